"""H2O: heavy hitters and recent tokens (Zhang et al. 2023, arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from ..parameters import check_number
from .base import Keep, recent


@named(
    "d2o",
    "As h2o, but what goes joins the kept token whose key is most like its own, if it is like enough.",
    "Wan et al. 2024", less="budget=0.4", look="green D --", technique="eviction by attention",
    takes=("every", "turns"), given={"merge": True},
)  # fmt: skip
@named(
    "h2o", "The tokens that received most attention so far and recent ones; the rest is dropped.",
    "Zhang et al. 2023", less="budget=0.4", look="green h -", technique="eviction by attention",
)  # fmt: skip
@dataclass(frozen=True)
class H2O(Keep):
    """Keep the tokens that have received the most attention so far, and the most recent ones.

    Definition: acc_j = sum over all queries so far of the softmax weight on token j, per KV head. After the
    prefill the recent window and the heavy tokens outside it stay; at every step the new token comes in and
    the lowest-scoring token outside the window leaves for good. This is the causal form: the official
    repository also has masked forms, one of which uses future queries.

    budget: tokens held, heavy + recent (see `Keep`). recent: part of the budget that is the recent window
    (0.5 in the paper's scripts: equal halves). Under grouped-query attention acc is averaged over the query
    heads of a group. State: `received`, acc, `[batch, kv_heads, slots]`; and `limits`, which `Keep` sets
    before it asks for the score: tokens that each row may hold.
    """

    recent: float = 0.5

    observes = True
    per_slot = ("received",)

    def __post_init__(self):
        super().__post_init__()
        check_number("recent", self.recent, lambda x: 0 <= x <= 1, "a part of the budget between 0 and 1")

    def observe(self, layer, received: Tensor) -> None:
        # new tokens have the last slots; evicted tokens have already left so_far
        so_far = layer.state.received
        if so_far is not None:
            received[..., : so_far.shape[-1]] += so_far
        layer.state.received = received

    def by_rule(self, layer) -> Tensor:
        return recent(layer, [max(1, int(limit * self.recent)) for limit in layer.state.limits])

    def score(self, layer) -> Tensor:
        return layer.state.received.masked_fill(self.held_by_rule(layer), torch.inf)
