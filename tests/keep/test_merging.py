"""Merging in whole models: windows, and nothing to merge; its definition is in tests/reference."""

import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep import H2O


def test_what_leaves_a_window_is_lost():
    model = tiny("mistral", sliding_window=9)
    found = [
        kvlab.decode(model, prompt(40), kvlab.make_cache(model, spec), 12).logprobs
        for spec in ("full", "d2o:budget=9", "d2o:budget=4")
    ]
    assert torch.allclose(found[0], found[1], atol=1e-5) and not torch.allclose(found[0], found[2], atol=1e-3)


def test_a_choice_that_lets_nothing_go_merges_nothing():
    class All(H2O):
        def choose(self, layer):
            layer.state.limits = layer.state.longest = list(layer.rows_held)
            return torch.arange(layer.slots).expand(layer.slot_positions.shape).clone()

    model = tiny("llama")
    found = [
        kvlab.decode(model, prompt(20, rows=2), kvlab.KVCache(model, keep=keep), 5).logprobs
        for keep in (None, All(0.4, merge=True))
    ]
    assert torch.allclose(*found, atol=1e-6)
