"""Whatever the sizes: what must hold of the slots of every cache, drawn at random."""

import torch
from drawn import FORMS
from hypothesis import given
from hypothesis import strategies as st
from tiny import UNROTATED, left_padded, prompt, tiny

import kvlab
from kvlab.keep import H2O, KeepAll, Pool, Sinks
from kvlab.methods import METHODS
from kvlab.place import Device, Host, InfiniGen, TopK
from kvlab.store import Exact, Growing, Int, Ragged, Static

budgets = st.one_of(st.floats(0.02, 1.0), st.integers(2, 60))
lengths = st.lists(st.integers(1, 45), min_size=1, max_size=4)


def keeps_of_methods(budget, model):
    """The keep of every method that has one, at this budget."""
    for name, method in METHODS.items():
        if name in UNROTATED and model.config.model_type == "gpt2":
            continue  # refused: it undoes rotary embeddings
        if "budget" in method.parameters and "keep" in (made := method.policies(budget=budget)):
            yield made["keep"]


@st.composite
def caches(draw, model):
    """A cache of three answers drawn at random, as a function that makes it anew."""
    budget, part = draw(budgets), draw(st.floats(0, 1))
    keeps = [KeepAll(), Sinks(budget, draw(st.integers(0, 6))), H2O(budget, part), Pool(budget)]
    keep = draw(st.sampled_from([*keeps, *keeps_of_methods(budget, model)]))
    form = draw(
        st.sampled_from([Exact(), Int(8), Int(8, 4), Int(8, axis="channel", symmetric=False), *FORMS])
    )
    store = draw(st.sampled_from([Growing(form), Static(64, form)]))
    fetch = draw(st.sampled_from([None, TopK(budget), InfiniGen(budget, alpha=3.0, ratio=max(part, 0.1))]))
    if keep.ragged:
        store, fetch = Ragged(form), None
    if keep.merge:  # what is rounded or on the host cannot be written anew
        store, fetch = draw(st.sampled_from([Growing(), Static(64)])), None
    place = Device() if fetch is None else Host(fetch)
    return lambda: kvlab.KVCache(model, keep=keep, store=store, place=place)


@given(data=st.data(), sizes=lengths, steps=st.integers(1, 6))
def test_slots(data, sizes, steps):
    model = tiny("llama", dtype=torch.float64)
    make = data.draw(caches(model))
    prompts = [prompt(size, seed=size) for size in sizes]
    ids, mask = left_padded(prompts)
    cache = make()
    stepper = kvlab.Stepper(model, cache)
    logits = [stepper.feed(ids, mask, last=True)]
    later = prompt(steps, rows=len(sizes), seed=77)
    logits += [stepper.feed(later[:, step : step + 1], last=True) for step in range(steps)]
    for layer in cache.layers:
        for row, size in enumerate(sizes):
            heads = [[p for p in one if p >= 0] for one in layer.positions[row].tolist()]
            for held in heads:
                assert held == sorted(set(held))
                assert held[-1] == size + steps - 1  # the newest token is always there
                assert len(held) == layer.rows_held[row] or layer.keep.policy.ragged
            assert max(map(len, heads)) == layer.rows_held[row] <= size + steps
        if layer.keep.policy.evicts and not layer.keep.policy.once:
            limits = layer.keep.longest
            assert all(held <= limit for held, limit in zip(layer.rows_held, limits, strict=True))
    assert cache.get_seq_length() == ids.shape[1] + steps
    for row, one in enumerate(prompts):
        alone = kvlab.Stepper(model, make())
        parts = [alone.feed(one, last=True)]
        parts += [alone.feed(later[row : row + 1, step : step + 1], last=True) for step in range(steps)]
        together = torch.stack([step[row] for step in logits])
        assert torch.allclose(together, torch.cat(parts), atol=1e-4)
