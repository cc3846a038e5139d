"""SnapKV: keep the tokens that the end of the prompt attends to (Li et al. 2024, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from ..named import named
from ..parameters import check_odd, check_whole
from .base import Keep, recent


@named(
    "snapkv",
    "What the last queries of the prompt attend to, and all tokens after it; the rest is dropped.",
    "Li et al. 2024", less="budget=0.4,window=4", look="green P --", technique="eviction by attention",
)  # fmt: skip
@dataclass(frozen=True)
class SnapKV(Keep):
    """After the prompt, keep its last `window` tokens and those that their queries attend to, smoothed over
    neighbours.

    Definition: the attention weights of the last `window` queries are summed for every earlier token, per KV
    head (averaged over the query heads of a group); each token then takes the largest sum within `kernel`
    neighbours, so that clusters stay together. The best tokens fill the budget, window included. Tokens
    written after the prompt all stay: the cache is compressed once.

    budget: tokens of the prompt held (see `Keep`). window: queries that vote, and that always stay. kernel:
    neighbours that share the largest vote, an odd number of tokens.
    State: `votes` `[batch, kv_heads, slots]`, until the prompt is compressed.
    """

    window: int = 16
    kernel: int = 5

    observes = once = True
    per_slot = ("votes",)

    def __post_init__(self):
        super().__post_init__()
        check_whole("window", self.window, 1, "queries")
        check_odd("kernel", self.kernel)

    @property
    def last_queries(self) -> int:
        return self.window

    def observe(self, layer, received: Tensor) -> None:
        layer.state.votes = received

    def by_rule(self, layer) -> Tensor:
        return recent(layer, self.window)

    def score(self, layer) -> Tensor:
        positions, window = layer.slot_positions, self.held_by_rule(layer)
        votes = layer.state.votes.masked_fill(window | (positions < 0), 0.0)  # the window only votes
        # No sum of `window` weights exceeds `window`; in a window above the budget the newest come first.
        return torch.where(window, self.window + 1 + positions, largest_near(votes, positions, self.kernel))

    def forget(self, state) -> None:
        state.votes = None


def largest_near(votes: Tensor, positions: Tensor, kernel: int) -> Tensor:
    """The largest vote within `kernel` neighbours of every token, `[batch, kv_heads, slots]`."""
    order = (positions < 0).int().argsort(dim=-1, stable=True)  # a row's own tokens, side by side
    pooled = max_pool1d(votes.gather(-1, order), kernel, stride=1, padding=kernel // 2)
    return torch.empty_like(pooled).scatter_(-1, order, pooled)
