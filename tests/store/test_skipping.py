"""Skipping: which layers stay exact, and what the bill makes of it."""

import torch
from tiny import left_padded, prompt, tiny

import kvlab
from kvlab.bill import account
from kvlab.spec import parse
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
    assert exact == [True, False, False, True]


def test_the_bill_counts_exact_layers_in_16_bits():
    kind = {
        "heads": 2, "key": 64, "value": 64, "scores": 1, "window": None, "reads": None, "latent": False,
        "index": 0, "index_scores": 0, "state": 0, "shares": None,
    }  # fmt: skip
    model = {"kinds": {"a": kind}, "layers": "aaaa", "context": 4096}
    sizes = {}
    for text in ("full", "int4", "int4:skip_layers=0+-1"):
        spec = parse(text)
        sizes[text] = account.account(spec, account.policies(spec), model, 1000).device
    assert sizes["int4:skip_layers=0+-1"] == (sizes["full"] + sizes["int4"]) / 2
