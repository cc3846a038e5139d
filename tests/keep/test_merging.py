"""Merging in whole models: batches, bytes, windows, buffers; its definition is in tests/reference."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.keep import H2O
from kvlab.place import Host
from kvlab.store import Int, Paged, Static


@pytest.mark.parametrize("spec", ["d2o:budget=0.4", "snapkv:budget=0.4,window=4,merge=true,chunk=3"])
def test_merging_is_the_same_twice_and_alone(spec):
    """Nothing is drawn: two runs are equal bit by bit, and rows of a batch hold what they hold alone."""
    model, prompts = tiny("llama"), [prompt(30), prompt(13, seed=1)]
    caches = []
    for ids, mask in (left_padded(prompts), left_padded(prompts), *((one, None) for one in prompts)):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, spec))
        stepper.feed(ids, mask)
        for _ in range(5):
            stepper.feed(prompt(1, seed=3).expand(len(ids), -1))
        caches.append(stepper.cache)
    for both, again, *alone in zip(*(cache.layers for cache in caches), strict=True):
        for one, other in zip(both.store.read("cpu"), again.store.read("cpu"), strict=True):
            assert torch.equal(one, other)
        for row, layer in enumerate(alone):
            there = both.positions[row] >= 0
            assert torch.equal(both.positions[row][there], layer.positions[0].flatten())
            for one, other in zip(both.store.read("cpu"), layer.store.read("cpu"), strict=True):
                assert torch.allclose(one[row][there], other[0].flatten(0, 1), atol=1e-4)


def test_no_bytes_but_the_threshold():
    model, held = tiny("llama"), {}
    for spec in ("h2o:budget=10", "d2o:budget=10"):
        cache = kvlab.make_cache(model, spec)
        kvlab.decode(model, prompt(60, rows=3), cache, 20)
        held[spec] = cache.stats().device_bytes
    assert held["d2o:budget=10"] - held["h2o:budget=10"] == 4 * 3 * 2 * 4  # layers, rows, heads, fp32


def test_what_leaves_a_window_is_lost():
    model = tiny("mistral", sliding_window=9)
    found = [
        kvlab.decode(model, prompt(40), kvlab.make_cache(model, spec), 12).logprobs
        for spec in ("full", "d2o:budget=9", "d2o:budget=4")
    ]
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[0], found[2], atol=1e-3)


def test_a_static_buffer_and_refusals():
    model = tiny("llama")
    one, other = (
        kvlab.decode(model, prompt(20, rows=2), kvlab.KVCache(model, keep=H2O(0.4, merge=True), **more), 9)
        for more in ({}, {"store": Static(60)})
    )
    assert torch.allclose(one.logprobs, other.logprobs, atol=1e-6)
    for more in ({"store": Int(8)}, {"store": Paged()}, {"place": Host()}):
        with pytest.raises(
            ValueError, match="merge writes tokens anew: they must be on the device, as they are"
        ):
            kvlab.KVCache(model, keep=H2O(0.4, merge=True), **more)
    with pytest.raises(ValueError, match="merge=3: expected true or false"):
        kvlab.make_cache(model, "h2o:merge=3")
