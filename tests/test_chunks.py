"""A prompt in chunks gives what the whole prompt gives, and is what happens when memory does not suffice."""

import copy

import pytest
import torch
from tiny import begun, prompt, tiny

import kvlab


def test_the_end_of_the_prompt():
    """Without `prefill` the first pass is the prompt, and later passes of many tokens continue the text."""
    model = tiny("llama")

    def held(cache):
        return cache.stats().tokens_held

    stepper = begun(model, "snapkv:budget=10,window=4", prompt(30))
    cache = stepper.cache
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

    with model.model.layers[2].register_forward_pre_hook(memory, with_kwargs=True):
        trace = kvlab.decode(model, ids, kvlab.make_cache(model, spec), 6)
    assert passes[:7] == [100, 50, 25, 25, 25, 25, 1]
    assert torch.equal(trace.tokens, right.tokens)
    assert torch.allclose(trace.logprobs, right.logprobs, atol=1e-4)


def test_what_does_not_fit_at_all_is_an_error_and_leaves_the_cache_empty():
    model, cache = tiny("llama"), kvlab.make_cache(tiny("llama"), "full")

    def memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with model.model.layers[2].register_forward_pre_hook(memory), pytest.raises(torch.OutOfMemoryError):
        kvlab.decode(model, prompt(100), cache, 3)
    assert cache.get_seq_length() == 0
    kvlab.decode(model, prompt(100), cache, 3)


def test_a_prompt_is_written_out_layer_by_layer():
    """While a layer computes, no more than its own K and V and those on the link wait for the host."""
    model, waiting = copy.deepcopy(tiny("llama")), []
    cache = kvlab.make_cache(model, "offload:link=1e9")

    def count(*_):
        waiting.append(sum(layer.place.uncommitted > 0 for layer in cache.layers))

    for block in model.model.layers:
        block.register_forward_pre_hook(count)
    kvlab.Stepper(model, cache).feed(prompt(50))
    assert waiting == [0, 1, 1]


def test_a_prompt_in_chunks_over_a_link_leaves_two_layers_on_the_device():
    model = tiny("llama")
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "offload:link=1e9"))
    stepper.feed(prompt(120), chunk=12)
    layer = 2 * 2 * 8 * 4 * 120  # K and V of 120 tokens in 2 heads of 8
    assert stepper.cache.stats().device_bytes <= 2 * 1.3 * layer
    assert stepper.cache.stats().host_bytes >= 3 * layer
