"""A prompt in chunks gives what the whole prompt gives, and is what happens when memory does not suffice."""

from contextlib import nullcontext

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep import H2O, Pool, PyramidKV, SnapKV
from kvlab.place import Host, InfiniGen, ModelledLink, OnDemand, TopK
from kvlab.store import Growing

pytestmark = pytest.mark.uncounted


KEEPS = {
    "snapkv": lambda: {"keep": SnapKV(0.4, window=5)},
    "snapkv, a window above the budget": lambda: {"keep": SnapKV(4, window=9)},
    "pyramidkv": lambda: {"keep": PyramidKV(0.4, window=5)},
    "pool": lambda: {"keep": Pool(0.6), "place": Host(InfiniGen(0.4, alpha=1.0, full_layers=1))},
    "pool among topk": lambda: {"keep": Pool(0.6, "lru"), "place": Host(TopK(0.4))},
    "infinigen over a link": lambda: {
        "keep": SnapKV(0.6, window=4),
        "store": Growing(),
        "place": Host(InfiniGen(0.4, full_layers=1), ModelledLink(1e9)),
    },
    "uvm": lambda: {"keep": H2O(0.4), "place": Host(OnDemand(0.5))},
}
CUTS = {1: [31], 2: [17, 14], 7: [3, 4, 5, 6, 4, 5, 4], "last of one": [12, 18, 1], "ones": [28, 1, 1, 1]}


@pytest.mark.parametrize("side", ["left", "right", "none", "left, under a window"])
@pytest.mark.parametrize("keep", KEEPS)
def test_a_prompt_cut_anywhere_is_compressed_to_the_same_set(keep, side):
    """Kept sets, columns and the logits of five steps, for every cut."""
    side, _, window = side.partition(", ")
    model = tiny("mistral", sliding_window=9) if window else tiny("llama")
    ids = prompt(31, rows=3)
    mask, steps = torch.ones_like(ids), [prompt(1, rows=3, seed=step) for step in range(5)]
    for row, padding in enumerate((0, 19, 6)):
        if side == "left":
            mask[row, :padding] = 0
        elif side == "right":  # the last real queries came in earlier passes
            mask[row, 31 - padding :] = 0
    found = {}
    for name, sizes in {None: [31], **CUTS}.items():
        cache = kvlab.KVCache(model, **KEEPS[keep]())
        stepper, at = kvlab.Stepper(model, cache), 0
        with cache.prefill() if name is not None else nullcontext():
            for size in sizes:
                stepper.feed(ids[:, at : at + size], mask[:, at : at + size])
                at += size
        held = [layer.positions for layer in cache.layers]
        logits = torch.cat([stepper.feed(token) for token in steps])
        moved, stats = [layer.positions for layer in cache.layers], cache.stats()
        columns = [getattr(getattr(layer.place, "fetch", None), "columns", None) for layer in cache.layers]
        columns = [None if one is None else one.sort(-1).values for one in columns]
        found[name] = held, moved, columns, logits, (stats.tokens_held, stats.moved_bytes)
    held, moved, columns, logits, counted = found.pop(None)
    for name, other in found.items():
        for ours, theirs in zip((*held, *moved, *columns), (*other[0], *other[1], *other[2]), strict=True):
            assert (ours is theirs is None) or torch.equal(ours, theirs), name
        assert torch.allclose(logits, other[3], atol=1e-4), name
        assert counted == other[4], name


def test_the_end_of_the_prompt():
    """Without `prefill` the first pass is the prompt, and later passes of many tokens continue the text."""
    model = tiny("llama")

    def held(cache):
        return cache.stats().tokens_held

    cache = kvlab.make_cache(model, "snapkv:budget=10,window=4")
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(prompt(30))
    assert held(cache) == 10
    stepper.feed(prompt(8))  # a question after a compressed context
    assert held(cache) == 18
    with pytest.raises(ValueError, match="prefill: the prompt in this cache has ended"), cache.prefill():
        pass
    cache.reset()
    stepper = kvlab.Stepper(model, cache)
    with cache.prefill():
        stepper.feed(prompt(20))
        with cache.prefill():  # the outermost block counts
            stepper.feed(prompt(10))
        assert held(cache) == 30
    assert held(cache) == 10
    cache.reset()
    with pytest.raises(KeyboardInterrupt), cache.prefill():
        model(prompt(20), past_key_values=cache)
        raise KeyboardInterrupt
    assert held(cache) == 20  # the prompt is open: another block goes on with it, or the next pass ends it
    model(prompt(10), past_key_values=cache)
    assert held(cache) == 10


def test_prefill_through_transformers_alone():
    """The block needs no Stepper; nothing is held back for methods that hold nothing or everything."""
    model, ids, kept = tiny("llama"), prompt(30), []
    for sizes in ([30], [11, 11, 8]):
        cache = kvlab.make_cache(model, "h2o:budget=9")
        with cache.prefill(), torch.no_grad():
            for part in ids.split(sizes, 1):
                model(part, past_key_values=cache)
        kept.append(cache.layers[0].positions)
        assert cache.stats().tokens_held == 9
    assert torch.equal(*kept)
    for spec in ("recompute", "full"):
        cache = kvlab.make_cache(model, spec)
        stepper = kvlab.Stepper(model, cache)
        with cache.prefill():
            stepper.feed(ids[:, :20])
            parts = stepper.feed(ids[:, 20:], last=True)
        whole = kvlab.Stepper(model, kvlab.make_cache(model, spec)).feed(ids, last=True)
        assert torch.allclose(parts, whole, atol=1e-4)


def test_logits_of_all_chunks_are_returned():
    model, ids = tiny("llama"), prompt(21, rows=2)
    whole = kvlab.Stepper(model, kvlab.make_cache(model, "full")).feed(ids)
    for chunk in (2, 4, 5, 20, 21, 50):  # 4 and 5 and 20 would leave one token over
        parts = kvlab.Stepper(model, kvlab.make_cache(model, "full")).feed(ids, chunk=chunk)
        assert torch.allclose(parts, whole, atol=1e-4)
    for bad in (1, 0, 2.5):
        with pytest.raises(ValueError, match=f"chunk={bad}: expected at least 2"):
            kvlab.Stepper(model, kvlab.make_cache(model, "full")).feed(ids, chunk=bad)


@pytest.mark.parametrize("spec", ["full", "h2o:budget=0.4", "infinigen:budget=0.3", "offload:link=1e9"])
def test_a_prompt_too_large_for_the_device_goes_in_smaller_parts(spec):
    model, ids, passes = tiny("llama"), prompt(100), []
    right = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 6)

    def memory(block, args, kwargs):  # the third block cannot take more than 30 tokens
        hidden = args[0] if args else kwargs["hidden_states"]
        passes.append(hidden.shape[1])
        if hidden.shape[1] > 30:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.model.layers[2].register_forward_pre_hook(memory, with_kwargs=True)
    try:
        trace = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 6)
    finally:
        hook.remove()
    assert passes[:7] == [100, 50, 25, 25, 25, 25, 1]
    assert torch.equal(trace.tokens, right.tokens)
    assert torch.allclose(trace.logprobs, right.logprobs, atol=1e-4)


def test_what_does_not_fit_at_all_is_an_error_and_leaves_the_cache_empty():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "full")

    def memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = model.model.layers[2].register_forward_pre_hook(memory)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            kvlab.decode(model, prompt(100), cache, 3)
    finally:
        hook.remove()
    assert cache.get_seq_length() == 0
    kvlab.decode(model, prompt(100), cache, 3)


def test_a_prompt_in_chunks_over_a_link_leaves_two_layers_on_the_device():
    model = tiny("llama")
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "offload:link=1e9"))
    stepper.feed(prompt(120), chunk=12)
    layer = 2 * 2 * 8 * 4 * 120  # K and V of 120 tokens in 2 heads of 8
    assert stepper.cache.stats().device_bytes <= 2 * 1.3 * layer
    assert stepper.cache.stats().host_bytes >= 4 * layer


def test_a_prompt_is_written_out_layer_by_layer():
    """While a layer computes, no more than its own K and V and those on the link wait for the host."""
    model = tiny("llama")
    cache = kvlab.make_cache(model, "offload:link=1e9")
    waiting = []

    def count(*_):
        waiting.append(sum(layer.place.uncommitted > 0 for layer in cache.layers))

    hooks = [block.register_forward_pre_hook(count) for block in model.model.layers]
    try:
        kvlab.Stepper(model, cache).feed(prompt(50))
    finally:
        for hook in hooks:
            hook.remove()
    assert waiting == [0, 1, 1, 1]
