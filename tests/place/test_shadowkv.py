"""ShadowKV beside its definition: what is where, windows; crops: tests/fuzz."""

import pytest
import torch
from tiny import fed, left_padded, prompt, tiny

from kvlab.models import rotations_of


@pytest.mark.parametrize("family", ["llama", "phi", "qwen3"])
def test_a_low_rank_of_what_the_projection_gave(family):
    """Partial rotation, normed keys: the product is the SVD's, before RoPE and after it."""
    model = tiny(family)
    ids, mask = left_padded([prompt(30), prompt(22, seed=1)])
    cache, _ = fed(model, "shadowkv:rank=9,chunk=4", ids, mask, steps=0)
    for layer, full in zip(cache.layers, fed(model, "full", ids, mask, steps=0)[0].layers, strict=True):
        keys, rotation = full.store.read(torch.device("cpu"))[0], rotations_of(model)[layer.order]
        for row in range(2):
            there = layer.positions[row, 0] >= 0
            plain = rotation.undo(keys[row, :, there], layer.positions[row][:, there])
            flat = plain.transpose(0, 1).flatten(1).double()
            u, s, vh = torch.linalg.svd(flat, full_matrices=False)
            expected = (u[:, :9] * s[:9] @ vh[:9]).float()
            state = layer.place
            assert torch.allclose(state.low[row, 0, there] @ state.basis[row], expected, atol=1e-4)


def test_layers_with_a_window_stay_on_the_device():
    model = tiny("mistral", sliding_window=9)
    cache, found = fed(model, "shadowkv:budget=3,rank=1,chunk=2", prompt(40, rows=2))
    full, expected = fed(model, "full", prompt(40, rows=2))
    assert torch.allclose(found, expected, atol=1e-5)
    assert cache.stats() == full.stats() and cache.stats().host_bytes == 0
