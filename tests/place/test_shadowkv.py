"""ShadowKV beside its definition: what is where, windows, low precision, crops."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.models import rotations_of


def stepped(model, spec, ids, steps=6, mask=None):
    """(cache, logits of every step)."""
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
    stepper.feed(ids, mask)
    return stepper.cache, [stepper.feed(prompt(1, rows=len(ids), seed=step)) for step in range(steps)]


@pytest.mark.parametrize("family", ["llama", "phi", "qwen3"])
def test_a_low_rank_of_what_the_projection_gave(family):
    """Partial rotation, normed keys: the product is the SVD's, before RoPE and after it."""
    model = tiny(family)
    ids, mask = left_padded([prompt(30), prompt(22, seed=1)])
    cache, _ = stepped(model, "shadowkv:rank=9,chunk=4", ids, 0, mask=mask)
    for layer, full in zip(cache.layers, stepped(model, "full", ids, 0, mask=mask)[0].layers, strict=True):
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
    cache, found = stepped(model, "shadowkv:budget=3,rank=1,chunk=2", prompt(40, rows=2))
    full, expected = stepped(model, "full", prompt(40, rows=2))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
    assert cache.stats() == full.stats() and cache.stats().host_bytes == 0


@pytest.mark.parametrize("cut", [4, 30])
def test_a_crop_leaves_what_was_held(cut):
    """Also into the prompt: with nothing given up it is a fresh cache of what is left."""
    model, ids = tiny("llama"), prompt(40, rows=2)
    cache, _ = stepped(model, "shadowkv:budget=1,rank=1,chunk=4,recent=1,outliers=2", ids)
    cache.crop(-cut)
    whole = torch.cat([ids, *(prompt(1, rows=2, seed=step) for step in range(6))], 1)[:, : 46 - cut]
    fresh = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    fresh.feed(whole)
    for step in range(4):
        token = prompt(1, rows=2, seed=step)
        with torch.no_grad():
            ours = model(token, past_key_values=cache).logits[:, -1]
        assert torch.allclose(ours, fresh.feed(token)[:, -1], atol=1e-4)
