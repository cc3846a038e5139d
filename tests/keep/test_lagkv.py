"""LagKV: a channel that does not vary; heads that hold different numbers; its definition: tests/reference."""

import random
from types import SimpleNamespace

import pytest
import torch

from kvlab.keep.lagkv import LagKV, weights


def test_a_channel_that_does_not_vary_says_nothing():
    x = torch.randn(1, 8, 6, generator=torch.Generator().manual_seed(0))
    x[:, 4:, 2] = 1.0
    assert weights(x, 4).isfinite().all()
    rest = x[..., [0, 1, 3, 4, 5]]
    assert not torch.equal(weights(x, 4), weights(rest, 4))
    assert torch.allclose(weights(x, 4).sum(-1), torch.ones(1, 1))


@pytest.mark.parametrize("seed", range(12))
def test_heads_that_hold_different_numbers_are_cut_each_by_itself(seed):
    """After adakv, and where a window has left some of the tokens that stayed."""
    draw, width = random.Random(seed), 6
    keep = LagKV(0.5, lag=draw.choice((2, 3, 4)), sinks=draw.choice((0, 2)))
    counts = [[draw.randint(1, 24) for _ in range(3)] for _ in range(2)]
    slots = max(map(max, counts))
    positions = torch.full((2, 3, slots), -1)
    for row, heads in enumerate(counts):
        for head, count in enumerate(heads):  # empty slots anywhere
            at = torch.tensor(sorted(draw.sample(range(slots), count)))
            positions[row, head, at] = torch.tensor(sorted(draw.sample(range(40), count)))
    keys, values = torch.randn(2, 2, 3, slots, width, generator=torch.Generator().manual_seed(seed))

    def layer(row, heads):
        here = slice(row, row + 1), heads
        return SimpleNamespace(
            slot_positions=positions[here], rows_held=[max(counts[row])], state=SimpleNamespace(limits=[9]),
            store=SimpleNamespace(read=lambda device: (keys[here], values[here])),
        )  # fmt: skip

    for row in range(2):
        together = layer(row, slice(None))
        for head in range(3):
            alone, held = layer(row, slice(head, head + 1)), positions[row, head] >= 0
            for found in (keep.score, keep.by_rule):
                assert torch.equal(found(together)[0, head][held], found(alone)[0, 0][held])
