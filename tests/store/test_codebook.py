"""Codebook: levels for the sphere's density, and what a sketch is for."""

import pytest
import torch

from kvlab.store import Codebook, codebook
from kvlab.store.codebook import levels, projection


def on_a_sphere(points: int, head_dim: int, seed: int = 0):
    """Random vectors of root mean square 1."""
    x = torch.randn(1, 1, points, head_dim, generator=torch.Generator().manual_seed(seed))
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("bits, error", [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_at_many_channels_the_levels_are_those_of_a_normal_variable(bits, error):
    """Errors of Max 1960, table 1."""
    found = levels(4096, bits)
    assert torch.equal(found, -found.flip(0)) and len(found) == 2**bits
    form, x = Codebook(bits), on_a_sphere(400, 1024)
    assert (form.decode(form.encode(x), x.dtype) - x).square().mean() == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_sketch_takes_the_bias_away_and_scatters_more(bits, monkeypatch):
    """Products with a query, averaged over 200 random projections; one alone errs more than the levels do."""
    x, head_dim = on_a_sphere(1, 16, seed=bits), 16
    plain, sketched = Codebook(bits), Codebook(bits, sketch=True)
    coarse = levels(head_dim, bits - 1)
    left = (x[..., None] - coarse).abs().amin(-1)  # what one bit fewer leaves over
    queries = torch.randn(50, head_dim, generator=torch.Generator().manual_seed(1))
    found = []
    for seed in range(200):
        monkeypatch.setattr(codebook, "projection", lambda d, where, seed=seed: projection(d, where, seed))
        found.append(sketched.decode(sketched.encode(x), torch.float32).flatten())
    monkeypatch.undo()
    found = torch.stack(found)
    bias = (found.mean(0) - x.flatten()).norm()
    scatter = (found - x.flatten()).norm(dim=1).mean()
    assert bias < 4 * scatter / 200**0.5 and bias < left.norm() / 3
    assert ((found.mean(0) - x.flatten()) @ queries.T).abs().max() < left.norm() * queries.norm(
        dim=1
    ).max() / 3
    assert scatter > 1.5 * (plain.decode(plain.encode(x), torch.float32) - x).norm()
