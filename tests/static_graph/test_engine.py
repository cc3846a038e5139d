"""The engine against transformers: tokens, log-probabilities, sliding past S, int8, addresses, forks."""

import numpy as np
import pytest
import torch
from tiny import greedy, left_padded, prompt, tiny

import kvlab
from kvlab.static_graph import PaddedCache, StaticGraphEngine
from kvlab.static_graph.engine import PROBE
from kvlab.static_graph.quantized import QMAX, quantize

S, STEPS = 24, 8  # few sizes, since every one is a graph to export
SMALL = {"num_hidden_layers": 2}  # what is exported in tests


def engine(family="llama", length=S, **options):
    return StaticGraphEngine(tiny(family, **SMALL), length, **({"chunk": 1} | options))


def reference(family, ids, mask=None, steps=STEPS, **changes):
    return greedy(family, ids, steps, mask, **SMALL, **changes)


def assert_same(trace, expected, atol=1e-4):
    assert torch.equal(trace.tokens, expected[0])
    assert torch.allclose(trace.logprobs, expected[1], atol=atol)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi", "opt", "gpt2", "gpt_neox"])  # Mistral: see below
def test_every_family_in_a_padded_batch(family):
    ids, mask = left_padded([prompt(13), prompt(4, seed=4), prompt(1, seed=1)])
    chunk = (
        5 if family in ("llama", "opt") else 1
    )  # passes of 5 tokens, of fewer, and of one; or of one alone
    trace = engine(family, chunk=chunk).generate(ids, STEPS, mask)
    assert_same(trace, reference(family, ids, mask))


@pytest.mark.parametrize("policy", ["shift", "double", "compromise", "ring"])
@pytest.mark.parametrize("form", ["single", "multi"])
@pytest.mark.parametrize("chunk", [1, 8])
def test_every_policy_in_both_forms(policy, form, chunk):
    ids = prompt(15, rows=2)  # grouped-query attention: four query heads, two KV heads
    trace = engine(policy=policy, form=form, chunk=chunk).generate(ids, STEPS)
    assert_same(trace, reference("llama", ids))


def banded(ids, length):
    """Logits of one pass of transformers in which a token sees itself and the length - 1 before it."""
    at = torch.arange(ids.shape[1])
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < length)
    model = tiny("llama", "sdpa", **SMALL)
    return model(input_ids=ids, attention_mask=seen[None, None], use_cache=False).logits


@pytest.mark.parametrize("policy", ["shift", "double", "compromise", "ring"])
def test_past_s_every_step_attends_to_the_newest_s_tokens(policy):
    """Positions go on; the reference is one pass over everything with a band of S."""
    made, ids = engine(policy=policy, form="single", chunk=8), prompt(S)
    stepper = kvlab.Stepper(made.model, PaddedCache(made))
    logits, later = [stepper.feed(ids)], prompt(70, seed=9)
    logits += [stepper.feed(later[:, i : i + 1]) for i in range(50)]
    logits.append(stepper.feed(later[:, 50:]))  # several at once into a full window: odd ones, then chunks
    with pytest.raises(ValueError, match=r"crop: \d+ tokens have left the window"):
        stepper.cache.crop(-1)
    expected = banded(torch.cat([ids, later], 1), S)
    assert torch.allclose(torch.cat(logits, 1), expected, atol=1e-4)
    assert not torch.allclose(expected, banded(torch.cat([ids, later], 1), S + 1), atol=1e-2)


def test_a_sliding_window_model_equals_transformers_far_beyond_its_window():
    model = tiny("mistral", sliding_window=S, **SMALL)
    ids = prompt(10)
    trace = StaticGraphEngine(model, chunk=1).generate(ids, 60)
    assert_same(trace, reference("mistral", ids, steps=60, sliding_window=S))
    with pytest.raises(ValueError, match="max_length=25: more than the model's sliding window of 24"):
        StaticGraphEngine(model, S + 1)


def test_the_engine_reads_and_writes_where_the_manager_says():
    """Addresses, and bytes that appear there without any copy of ours."""
    made = engine(form="single", chunk=8)
    manager, ids = made.manager(), prompt(13)
    made.feed(manager, ids[0].tolist())
    copied = manager.copied_bytes
    assert copied == len(manager.buffers) * 13 * manager.row_bytes  # the prompt's real rows, once
    before = manager.buffers.copy()
    past, place = manager.past_addresses(), manager.place()
    made.feed(manager, [5])
    bound = made.graphs[1].bound
    names = [name for name, _ in made.graphs[1].past]
    assert [bound[name] for name in names] == past
    assert [bound[name.replace("past", "new")] for name in names] == place
    base, size = manager.buffers.ctypes.data, manager.buffers.nbytes
    assert all(base <= address < base + size for address in past + place)
    assert manager.copied_bytes == copied  # the engine put the step's rows where they belong
    changed = (manager.buffers != before).nonzero()
    row = (place[0] - base) // manager.row_bytes
    assert set(changed[1] // manager.head_dim) == {row} and len(set(changed[0])) == len(manager.buffers)
    full = kvlab.make_cache(made.model, "full")
    made.model(input_ids=torch.cat([ids, torch.tensor([[5]])], 1), past_key_values=full, use_cache=True)
    for layer, cached in enumerate(full.layers):
        for kind, held in enumerate(cached.store.read(torch.device("cpu"))):
            for head in range(2):
                ours = manager.rows()[4 * layer + 2 * kind + head, 0]
                assert np.allclose(ours, held[0, head].numpy(), atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])  # a table of positions, and angles
def test_a_chunk_that_ends_where_the_context_does(family):
    """What stands behind its tokens has no position of its own; guesses are taken back, as a draft's are."""
    made, ids, steps = engine(family, length=None, chunk=5), prompt(128), []
    assert made.length == 128
    with torch.no_grad():
        expected = tiny(family, "sdpa", **SMALL)(ids).logits
    stepper = kvlab.Stepper(made.model, PaddedCache(made))
    made.graphs[1].run = lambda run=made.graphs[1].run: (steps.append(1), run())
    logits = [stepper.feed(ids[:, :121])]
    stepper.cache.forward((ids[:, 121:125] + 1) % 50)  # four wrong guesses in one pass
    stepper.cache.crop(-4)
    logits += [stepper.feed(ids[:, 121:125]), stepper.feed(ids[:, 125:])]
    assert len(steps) == PROBE + 1 and torch.allclose(torch.cat(logits, 1), expected, atol=1e-4)


@pytest.mark.parametrize("options", [{"form": "multi"}, {"form": "single", "policy": "ring"}])
def test_forks_crops_and_bytes(options):
    made, ids = engine(**options), prompt(9, rows=2)
    forked = kvlab.Stepper(made.model, PaddedCache(made))
    forked.feed(ids)
    rows = torch.tensor([1, 0, 1])
    forked.fork(rows)
    apart = kvlab.Stepper(made.model, PaddedCache(made))
    apart.feed(ids[rows])
    token = prompt(1, rows=3, seed=5)
    expected = apart.feed(token)
    assert torch.allclose(forked.feed(token), expected, atol=1e-5)
    cache = forked.cache
    cache.crop(-1)
    assert cache.get_seq_length() == 9
    again = cache.forward(token, position_ids=None).logits
    assert torch.allclose(again, expected, atol=1e-5)
    stats = cache.stats()
    arrays = {}
    for manager in cache.managers:
        for value in (manager.buffers, manager.mask, manager._staging):
            if value is not None:
                arrays[value.ctypes.data] = value.nbytes
    assert stats.device_bytes == sum(arrays.values()) and stats.host_bytes == stats.moved_bytes == 0
    assert stats.tokens_seen == stats.tokens_held == 10
    cache.reset()
    assert cache.stats().device_bytes == 0 and cache.get_seq_length() == 0


def test_as_a_method():
    model, ids = tiny("llama", **SMALL), prompt(15)
    cache = kvlab.make_cache(model, f"padded:length={S},policy=compromise,extra=0.25,chunk=1")
    trace = kvlab.decode(model, ids, cache, STEPS)
    assert_same(trace, reference("llama", ids))
    assert cache.managers[0].spare == 5 and trace.tokens_held[-1] == 15 + STEPS - 1
    with pytest.raises(ValueError, match=r"use kvlab\.decode"):
        model.generate(ids, past_key_values=cache, max_new_tokens=2)


def test_rows_that_are_quantized_again_at_every_step_drift():
    """A fixed scale rounds each row once. With a new scale for all rows at every step, errors add up."""
    rows = torch.randn(32, 200, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scale = rows.abs().amax((1, 2)) / QMAX
    once = quantize(rows, scale) * scale[:, None, None]
    assert (once - rows).abs().max() <= scale.max() / 2
    again = rows[:, :0]
    for step in range(rows.shape[1]):
        again = torch.cat([again, rows[:, step : step + 1]], 1)
        scale = again.abs().amax((1, 2)) / QMAX
        again = quantize(again, scale) * scale[:, None, None]
    assert (again - rows).square().mean() > 1.2 * (once - rows).square().mean()
