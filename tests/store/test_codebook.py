"""Codebook: levels for the sphere's density, and what a sketch is for."""

import pytest
import torch

from kvlab.store import Codebook
from kvlab.store.codebook import levels


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
