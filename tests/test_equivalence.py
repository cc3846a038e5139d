"""Settings at which a method must equal the full cache, beyond those of tests/families."""

import functools

import pytest
import torch
from families import profiles
from families.profiles import profiled
from tiny import FAMILIES, LOSSY, NEUTRAL, SAME, greedy, prompt, refused, tiny

import kvlab

STEPS = 8


def in_turn(specs) -> list[tuple[str, str]]:
    """Every setting with two families, all of them in turn; every method meets every family in
    tests/families, padded as well."""
    names = list(FAMILIES)
    return [(spec, names[(3 * i + j) % len(names)]) for i, spec in enumerate(specs) for j in range(2)]


@functools.cache
def reference(family: str):
    return greedy(family, prompt(21, rows=2), STEPS)


@pytest.mark.parametrize("spec, family", in_turn([spec for spec in NEUTRAL if spec not in SAME.values()]))
def test_equals_transformers(spec, family):
    model, ids = tiny(family), prompt(21, rows=2)
    if refused(model, spec):
        return
    spec = profiled(spec, model)
    trace = kvlab.decode(model, ids, kvlab.make_cache(model, spec), STEPS)
    tokens, logprobs = reference(family)
    assert torch.equal(trace.tokens, tokens)
    assert torch.allclose(trace.logprobs, logprobs, atol=1e-4)


def test_lossy_settings_do_change_something():
    """Otherwise the tests above would pass for a method that does nothing."""
    model, ids = tiny("llama"), prompt(40, rows=2)
    full = kvlab.decode(model, ids, kvlab.make_cache(model, "full"), STEPS).logprobs
    for spec in LOSSY + profiles.LOSSY:
        cache = kvlab.make_cache(model, profiled(spec, model))
        logprobs = kvlab.decode(model, ids, cache, STEPS).logprobs
        assert torch.allclose(logprobs[:, 0], full[:, 0], atol=1e-5)  # the prompt attends to itself as it is
        assert not torch.allclose(logprobs[:, 1:], full[:, 1:], atol=1e-6), spec
