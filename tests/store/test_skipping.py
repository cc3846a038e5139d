"""Skipping: which layers stay exact, and what the bill makes of it."""

import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.store import Exact


def test_the_named_layers_hold_what_the_full_cache_holds():
    model = tiny("llama")
    ids, mask = left_padded([prompt(19, seed=1), prompt(8, seed=2)])
    steppers = [
        kvlab.Stepper(model, kvlab.make_cache(model, spec)) for spec in ("full", "int2:skip_layers=0+-1")
    ]
    for stepper in steppers:
        stepper.feed(ids, mask)
    exact = []
    for full, ours in zip(*(stepper.cache.layers for stepper in steppers), strict=True):
        same = all(
            torch.equal(a, b) for a, b in zip(full.store.read("cpu"), ours.store.read("cpu"), strict=True)
        )
        exact.append(same and type(ours.store.format) is Exact)
    assert exact == [True, False, True]
