"""LagKV: a channel that does not vary, and what is chosen at all; its definition is in tests/reference."""

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep.lagkv import weights


def test_a_channel_that_does_not_vary_says_nothing():
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    x[:, 4:, 2] = 1.0
    assert weights(x, 4).isfinite().all()
    rest = x[..., [0, 1, 3, 4, 5]]
    assert not torch.equal(weights(x, 4), weights(rest, 4))
    assert torch.allclose(weights(x, 4).sum(-1), torch.ones(1, 1))


@pytest.mark.parametrize("spec, rule", [("lagkv:budget=40,lag=8", 12), ("expected:budget=40", 5)])
def test_what_a_rule_holds_and_what_the_score_chose(spec, rule):
    cache = kvlab.make_cache(tiny("llama"), spec)
    kvlab.Stepper(cache.model, cache).feed(prompt(100))
    assert cache.stats().scored == pytest.approx(1 - rule / 40)
