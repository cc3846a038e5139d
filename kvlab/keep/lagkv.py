"""LagKV: keep the tokens that differ most from the next block (Liang et al. 2025, arXiv 2504.04704)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from ..parameters import check_fraction_or_count, resolve_budget
from .base import Keep


@named(
    "lagkv",
    "The tokens that vary most on the scale of those after them, and all tokens after the prompt.",
    "Liang et al. 2025", less="budget=0.4,lag=3,sinks=2", look="purple > -.", technique="eviction by keys",
)  # fmt: skip
@dataclass(frozen=True)
class LagKV(Keep):
    """After the prompt, keep the tokens that vary most on the scale of the tokens that follow. No query is
    needed.

    Definition: after the first `sinks` tokens, the prompt is cut into blocks of `lag` tokens. Each channel of
    a block's keys is scaled to the smallest and largest value that it takes in the next block; a token's key
    score is the softmax, over the block, of the standard deviation of its scaled channels; its value score
    likewise, and their mean ranks it within its block and KV head. The best of every block stay, the same
    number in each to within one. The first tokens, the last whole block, which has no next one, and the
    tokens after it stay; if they exceed the budget, only the newest of them. Tokens written after the prompt
    all stay.

    budget: tokens of the prompt held (see `Keep`). lag: tokens of a block; a fraction is of the tokens that
    the row may hold. With the paper's 1,024 (kvpress: 128) the block that always stays fills a budget of 20 %
    on all prompts below 5,000 (640) tokens, and nothing is chosen; a quarter of the budget leaves at least
    half of it to the choice, first tokens aside. sinks: first tokens that stay (paper: 16, kvpress: 4).
    Deviation: the paper goes on while decoding; here the prompt is compressed once, as in kvpress. A channel
    that does not vary in the next block counts as 0.
    """

    lag: float | int = 0.25
    sinks: int = 4

    once = True
    scores_keys = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "lag", check_fraction_or_count("lag", self.lag))

    def block(self, limit: int) -> int:
        """Tokens of a block in a row that may hold `limit`."""
        return max(2, resolve_budget(self.lag, limit) or limit)

    def parts(self, layer) -> Iterator[tuple[int, Tensor, int, int, int]]:
        """How tokens are divided: (row, its heads that hold so many tokens, first tokens, blocks that have a
        next one, tokens of a block). Heads hold different numbers where a window has left some of those that
        stayed, and after adakv."""
        for row, held in enumerate(layer.slot_positions >= 0):
            lag, counts = self.block(layer.state.limits[row]), held.sum(-1)
            for count in counts.unique().tolist():
                heads = (counts == count).nonzero()[:, 0]
                one = heads[0]
                first = int((held[one] & (layer.slot_positions[row, one] < self.sinks)).sum())
                yield row, heads, first, max(0, (count - first) // lag - 1), lag

    def by_rule(self, layer) -> Tensor:
        """The first tokens, the last whole block, and the tokens after it."""
        held = layer.slot_positions >= 0
        order, stays = held.cumsum(-1) - 1, held.clone()
        for row, heads, first, blocks, lag in self.parts(layer):
            at = order[row, heads]
            stays[row, heads] &= (at < first) | (at >= first + blocks * lag)
        return stays

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        keys, values = layer.store.read(positions.device)  # [batch, kv_heads, slots, head_dim]
        score = 1.0 + positions  # of the first and last tokens; those of a block are below 1
        for row, heads, first, blocks, lag in self.parts(layer):
            own, there = score[row, heads], positions[row, heads] >= 0
            if blocks > 0:
                chosen = slice(first, first + blocks * lag)
                both = (x[row, heads][there].unflatten(0, (len(heads), -1)).float() for x in (keys, values))
                weight = sum(weights(x[:, first : chosen.stop + lag], lag) for x in both)
                ranked = own[there].unflatten(0, (len(heads), -1))
                ranked[:, chosen] = (weight.argsort(dim=-1, stable=True).argsort(dim=-1) / lag).flatten(1)
                own[there] = ranked.flatten()
            own[there & (positions[row, heads] < self.sinks)] = torch.inf
            score[row, heads] = own
        return score


def weights(x: Tensor, lag: int) -> Tensor:
    """Softmax over each block except the last of how much a token's channels vary on the scale of the next
    block: x `[kv_heads, blocks * lag, head_dim]` -> `[kv_heads, blocks - 1, lag]`."""
    blocks = x.unflatten(1, (-1, lag))
    least, most = (getattr(blocks[:, 1:], name)(2, keepdim=True) for name in ("amin", "amax"))
    span = most - least
    scaled = ((blocks[:, :-1] - least) / span).masked_fill(span == 0, 0.0)
    return scaled.std(-1).softmax(-1)
