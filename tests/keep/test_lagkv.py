"""LagKV: a channel that does not vary; its definition is in tests/reference."""

import contextlib

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


@pytest.mark.parametrize("budget", [3, 10, 0.5])
def test_heads_of_adakv_hold_different_numbers_so_a_later_turn_is_refused(budget):
    """They were cut as if all held as many, which is wrong without a word where the numbers divide."""
    model, ids = tiny("llama"), prompt(40)
    for turns, raises in (("all", True), ("first", False)):
        cache = kvlab.make_cache(model, f"adakv:of=lagkv,budget={budget},safeguard=0,turns={turns}")
        model(ids[:, :30], past_key_values=cache)
        model(ids[:, :1], past_key_values=cache)  # the prompt has ended
        held = [(layer.slot_positions >= 0).sum(-1) for layer in cache.layers]
        assert any((one != one[:, :1]).any() for one in held)
        refused = pytest.raises(ValueError, match="lagkv cuts a row into blocks that all heads share")
        with refused if raises else contextlib.nullcontext():
            model(ids[:, 30:], past_key_values=cache)
            model(ids[:, :1], past_key_values=cache)
