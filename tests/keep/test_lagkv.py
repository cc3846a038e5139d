"""LagKV beside its definition: equal shares of every block, what is chosen at all, bad input."""

import pytest
import torch
from tiny import prompt, tiny

import kvlab
from kvlab.keep.lagkv import weights


def kept(spec, tokens):
    cache = kvlab.make_cache(tiny("llama", max_position_embeddings=2048), spec)
    kvlab.Stepper(cache.model, cache).feed(prompt(tokens))
    return cache.layers[2].positions[0]


def test_every_block_gives_as_many_but_for_one():
    held = kept("lagkv:budget=40,lag=8", 100)  # 4 first, 11 blocks and a last one with no rest
    for head in held:
        assert head[:4].tolist() == [0, 1, 2, 3] and head[-8:].tolist() == [*range(92, 100)]
        of_blocks = torch.bincount((head[4:-8] - 4) // 8, minlength=11)
        assert of_blocks.sum() == 28 and of_blocks.max() - of_blocks.min() == 1
    assert not torch.equal(held[0], held[1])


def test_a_long_lag_chooses_nothing_at_these_lengths():
    """With a lag of 128, as in kvpress; with a quarter of the budget something is."""
    newest = [*range(4), *range(604, 700)]
    assert kept("lagkv:budget=100,lag=128", 700)[0].tolist() == newest
    found = kept("lagkv:budget=100", 700)[0].tolist()
    assert len(set(found) - set(newest)) >= 46


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
