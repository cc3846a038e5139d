"""LagKV: keep the tokens that differ most from the next block (Liang et al. 2025, arXiv 2504.04704)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from ..parameters import check_fraction_or_count, resolve_budget
from .base import Keep, prompts


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
    that does not vary in the next block counts as 0. ValueError for a lag longer than the prompt.
    """

    lag: float | int = 0.25
    sinks: int = 4

    once = True
    scores_keys = True

    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "lag", check_fraction_or_count("lag", self.lag))

    def limits(self, layer) -> list[int]:
        found = super().limits(layer)
        for limit, tokens in zip(found, prompts(layer), strict=True):
            self.block(limit, tokens)  # refuses a lag longer than the prompt
        return found

    def block(self, limit: int, tokens: int) -> int:
        """Tokens of a block in a row of so many tokens that may hold `limit`."""
        if isinstance(self.lag, int) and self.lag > tokens:
            raise ValueError(f"lag={self.lag}: longer than a prompt of {tokens} tokens")
        return max(2, resolve_budget(self.lag, limit) or limit)

    def cut(self, layer, row: int) -> tuple[int, int, int]:
        """How a row's tokens are divided: (first tokens, blocks that have a next one, tokens of a block)."""
        lag = self.block(layer.state.limits[row], layer.rows_held[row])
        held = (layer.slot_positions[row] >= 0).sum(-1)
        if held.min() < held.max():
            raise ValueError(
                "lagkv cuts a row into blocks that all heads share, and after adakv heads hold different "
                "numbers of tokens: expected one turn, or turns='first'"
            )
        positions = layer.slot_positions[row, 0]
        first = int(((positions >= 0) & (positions < self.sinks)).sum())
        return first, max(0, (layer.rows_held[row] - first) // lag - 1), lag

    def by_rule(self, layer) -> Tensor:
        """The first tokens, the last whole block, and the tokens after it."""
        held = layer.slot_positions >= 0
        order, stays = held.cumsum(-1) - 1, held.clone()
        for row in range(len(held)):
            first, blocks, lag = self.cut(layer, row)
            stays[row] &= (order[row] < first) | (order[row] >= first + blocks * lag)
        return stays

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        keys, values = layer.store.read(positions.device)  # [batch, kv_heads, slots, head_dim]
        score = 1.0 + positions  # of the first and last tokens; those of a block are below 1
        for row, held in enumerate(positions >= 0):
            first, blocks, lag = self.cut(layer, row)
            if blocks > 0:
                chosen = slice(first, first + blocks * lag)
                parts = (x[row][held].unflatten(0, (len(held), -1)).float() for x in (keys, values))
                weight = sum(weights(x[:, first : chosen.stop + lag], lag) for x in parts)
                rank = weight.argsort(dim=-1, stable=True).argsort(dim=-1) / lag
                own = score[row][held].unflatten(0, (len(held), -1))
                own[:, chosen] = rank.flatten(1)
                score[row][held] = own.flatten()
            score[row][held & (positions[row] < self.sinks)] = torch.inf
        return score


def weights(x: Tensor, lag: int) -> Tensor:
    """Softmax over each block except the last of how much a token's channels vary on the scale of the next
    block: x `[kv_heads, blocks * lag, head_dim]` -> `[kv_heads, blocks - 1, lag]`."""
    blocks = x.unflatten(1, (-1, lag))
    least, most = (getattr(blocks[:, 1:], name)(2, keepdim=True) for name in ("amin", "amax"))
    span = most - least
    scaled = ((blocks[:, :-1] - least) / span).masked_fill(span == 0, 0.0)
    return scaled.std(-1).softmax(-1)
