"""Sinks: the kept set is known in advance; and what every keep has in common."""

import pytest
import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.reference import keep


@pytest.mark.parametrize("budget, sinks", [(10, 4), (6, 0), (4, 4), (2, 4), (0.25, 3), (0.01, 4)])
def test_kept_set(budget, sinks):
    model = tiny("llama")
    ids, mask = left_padded([prompt(40), prompt(12, seed=1), prompt(3, seed=2)])
    cache = kvlab.KVCache(model, keep=kvlab.keep.Sinks(budget, sinks))
    stepper = kvlab.Stepper(model, cache)
    stepper.feed(ids, mask)
    for step in range(6):
        for row, tokens in enumerate((40, 12, 3)):
            expected = keep.sinks(tokens + step, keep.budget(budget, tokens), sinks)
            for layer in cache.layers:
                held = layer.positions[row]
                assert [p for p in held[0].tolist() if p >= 0] == expected
                assert torch.equal(held[0], held[1])
        stepper.feed(prompt(1, rows=3, seed=step))


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True, float("nan"), None])
def test_a_budget_that_makes_no_sense(value):
    with pytest.raises(ValueError, match="budget="):
        kvlab.keep.Sinks(value)


def test_other_bad_parameters():
    with pytest.raises(ValueError, match="sinks=-1"):
        kvlab.keep.Sinks(0.2, -1)
    with pytest.raises(ValueError, match="recent=2"):
        kvlab.keep.H2O(0.2, 2)


def test_a_method_of_ones_own_in_a_few_lines():
    class SmallestKeys(kvlab.keep.Keep):
        """Keep the keys with the smallest norm."""

        def score(self, layer):
            keys, _ = layer.store.read(layer.slot_positions.device)
            return -keys.norm(dim=-1)

    model, ids = tiny("llama"), prompt(30)
    cache = kvlab.KVCache(model, keep=SmallestKeys(5))
    stepper = kvlab.Stepper(model, cache)
    everything = kvlab.KVCache(model)
    kvlab.Stepper(model, everything).feed(ids)
    stepper.feed(ids)
    norms = everything.layers[0].store.keys[0][0].norm(dim=-1)  # layer 0 sees the same keys in both
    smallest = norms.topk(5, largest=False).indices.sort().values
    assert torch.equal(cache.layers[0].positions[0], smallest)


def test_a_keep_that_does_not_score_says_so():
    model = tiny("llama")
    with pytest.raises(TypeError, match="define score"):
        kvlab.decode(model, prompt(10), kvlab.KVCache(model, keep=kvlab.keep.Keep(3)), 2)
