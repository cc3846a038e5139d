"""A step through all layers in one call: the bits of the step layer by layer, and only where it may."""

import gc
import weakref

import pytest
import torch
from fast.atonce import both, held, life
from tiny import begun, interrupt, left_padded, prompt

import kvlab
from kvlab.fast import all_layers, cpu
from kvlab.fast.step import made
from kvlab.keep import H2O
from kvlab.store import Growing, Int

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = ("full", "int8", "int4:group=16", "fp8", "fp8:format=e5m2", "static")


@pytest.mark.parametrize("spec", METHODS)
def test_a_cache_says_and_holds_the_same_layer_by_layer(model, spec, went, monkeypatch):
    found, expected = both(model(), life(spec), monkeypatch)
    assert sum(went) >= 40 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape, spec, rows", [
    ("alone", "full", 1), ("grouped", "int4:group=16", 3), ("of three", "int8", 1), ("of eight", "full", 3),
    ("wide", "int4:group=16", 1),
])  # fmt: skip
def test_heads_of_every_width_and_group(model, shape, spec, rows, went, monkeypatch):
    """Each in one format: every pair is a kernel that takes seconds to compile."""
    found, expected = both(model(shape), life(spec, rows, steps=6), monkeypatch)
    assert sum(went) >= 6 and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_biases_norms_of_heads_and_narrow_weights(model, family, weights, went, monkeypatch):
    found, expected = both(model(family=family, weights=weights), life("int8", 2, steps=5), monkeypatch)
    assert sum(went) >= 5 and all(map(torch.equal, found, expected))


def test_more_tokens_than_a_split_holds(model, went, monkeypatch):
    def say(fast):
        stepper = kvlab.Stepper(fast, cache := kvlab.make_cache(fast, "int8"))
        found = [stepper.feed(prompt(cpu.SPLIT - 3, seed=5), last=True)]
        found += [stepper.feed(prompt(1, seed=step), last=True) for step in range(6)]
        return found + held(cache)

    found, expected = both(model(max_position_embeddings=2 * cpu.SPLIT), say, monkeypatch)
    assert sum(went) >= 5 and all(map(torch.equal, found, expected))


def test_a_mask_that_hides_nothing_is_none(model, went):
    fast = model()
    said = fast.generate(
        prompt(9), attention_mask=torch.ones(1, 9), past_key_values=kvlab.make_cache(fast, "full"),
        max_new_tokens=8, do_sample=False, eos_token_id=None,
    )  # fmt: skip
    assert said.shape == (1, 17) and sum(went) >= 6


MORE = (
    "h2o:budget=9,chunk=2", "h2o:budget=9,every=3", "d2o:budget=9", "keydiff:budget=9,every=1",
    "quest:budget=0.5", "kivi4:group=3,recent=6", "nvfp4", "int8:rotate=true", "int5",
    "int8:symmetric=false",
)  # fmt: skip


@pytest.mark.parametrize("spec", MORE)
def test_what_does_more_than_add_a_token_goes_layer_by_layer(model, spec, went):
    fast = model()
    stepper = begun(fast, spec, prompt(23))
    for step in range(4):
        stepper.feed(prompt(1, seed=step), last=True)
    assert len(went) == 4 and not any(went)


def test_who_looks_at_a_layer_is_called(model, went):
    fast, seen = model(), []
    stepper = begun(fast, "full", prompt(9), prompt(1), prompt(1))
    cache = stepper.cache
    assert went[-1]
    cache.layers[1].on_read = lambda *given: seen.append(given)
    stepper.feed(prompt(1), last=True)
    assert seen and not went[-1]
    cache.layers[1].on_read = None
    for _ in range(2):
        stepper.feed(prompt(1), last=True)
    assert went[-1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_token_that_the_format_refuses_is_refused_by_its_layer(model, wrong, went, monkeypatch):
    fast = model()
    weight = fast.model.layers[1].self_attn.v_proj.weight

    @torch.no_grad()
    def say(fast):
        cache = begun(fast, "int8", prompt(9), prompt(1), prompt(1)).cache
        kept = weight[0, 0].clone()
        weight[0, 0] = wrong
        with pytest.raises(ValueError, match="layer 1: values: int8: KV head 0 holds NaN or infinity"):
            fast(prompt(1), past_key_values=cache)
        weight[0, 0] = kept
        return held(cache)

    found, expected = both(fast, say, monkeypatch)
    assert went[-2:] == [True, False] and all(map(torch.equal, found, expected))


def test_an_interruption_behind_the_compiled_step_leaves_a_broken_cache(model, went, monkeypatch):
    """Its slots may have closed up in K and V, and the host has counted nothing."""
    fast = model()
    stepper = begun(fast, "h2o:budget=8", prompt(20), prompt(1), prompt(1))
    together = all_layers.together
    monkeypatch.setattr(all_layers, "together", lambda *given, **how: interrupt(together(*given, **how)))
    with pytest.raises(KeyboardInterrupt):
        stepper.feed(prompt(1))
    assert went[-1] and stepper.cache.broken


@torch.no_grad()
def test_a_token_that_is_refused_behind_a_layer_that_has_evicted_leaves_a_broken_cache(model, went):
    fast = model()
    how = {"keep": H2O(8), "store": Growing(Int(8))}
    stepper = begun(fast, how, prompt(20), prompt(1), prompt(1))
    assert went[-1]
    fast.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="layer 1: its format does not store the token"):
        fast(prompt(1), past_key_values=stepper.cache)
    assert stepper.cache.broken


def test_it_keeps_no_buffer_alive(model, went):
    fast = model()
    cache = begun(fast, "full", prompt(9), prompt(1), prompt(1)).cache
    assert went[-1]
    gone = [weakref.ref(made(layer)) for layer in cache.layers], weakref.ref(cache)
    cache.reset()
    gc.collect()
    assert all(one() is None for one in gone[0])
    del cache
    gc.collect()
    assert gone[1]() is None and not fast.forward.body.whole.caches


def test_rows_with_padding_and_rows_that_end_go_layer_by_layer(model, went):
    fast = model()
    padded, one = left_padded([prompt(9), prompt(5)]), prompt(1, 2)
    begun(fast, "full", padded, one, (one, torch.tensor([[1], [0]])), one)
    assert not any(went)
