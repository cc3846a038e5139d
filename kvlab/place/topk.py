"""TopK: fetch only the keys and values with the largest attention weights (Gupta et al. 2021,
arXiv 2106.06899)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import group_importance, true_scores
from ..parameters import check_fraction_or_count, check_whole, resolve_budget
from .fetch import Fetch


def most_important(importance: Tensor, counts: list[int]) -> Tensor:
    """The `counts[row]` slots with the highest importance, `[batch, kv_heads, max(counts)]`, -1 beyond.

    importance `[batch, kv_heads, slots]`, -inf (or below any weight) where there is nothing. The tensor's
    `there` is the number of slots that are not -1, so that nothing waits for a GPU to count them.
    """
    most = min(max(counts), importance.shape[-1])
    slots = importance.topk(most, dim=-1, sorted=False).indices
    if min(counts) < most:
        slots = slots.gather(-1, importance.gather(-1, slots).argsort(-1, descending=True))
        rank = torch.arange(most, device=slots.device)
        limit = torch.tensor(counts, device=slots.device).view(-1, 1, 1)
        slots = slots.masked_fill(rank >= limit, -1)
    slots.there = sum(min(count, most) for count in counts) * importance.shape[1]
    return slots


@dataclass(frozen=True)
class TopK(Fetch):
    """The oracle: it knows the true attention scores of this step before it fetches.

    It chooses when the layer has its query, so the fetch cannot begin earlier and the step waits for it. Only
    the chosen K and V count as moved; scores are computed over all keys, wherever these are.
    The newest token is always attended.

    budget: tokens fetched at most per step and head; a fraction is of the row's tokens seen so far, or of the
    layer's window where that is shorter.
    full_layers: the first layers that fetch everything.
    """

    budget: float | int = 0.2
    full_layers: int = 0

    def __post_init__(self):
        object.__setattr__(self, "budget", check_fraction_or_count("budget", self.budget))
        check_whole("full_layers", self.full_layers, 0, "layers")

    def whole(self, index: int) -> bool:
        return index < self.full_layers

    def cost(self, use) -> tuple[float, float]:
        if self.whole(use.order) or (self.speculates and use.order == 0):  # the first layer has no guess
            return super().cost(use)
        window = use.kind["window"]
        budget = resolve_budget(self.budget, min(use.tokens, window or use.tokens))
        return self.chosen_cost(use, math.inf if budget is None else budget)

    def chosen_cost(self, use, budget: float) -> tuple[float, float]:
        """`cost` where a step chooses so many tokens at most."""
        return min(budget, use.held), 0.0

    def caps(self, layer, appended: int) -> list[int]:
        """The most tokens that each row may fetch at this step; the layer already holds `appended` (0 or 1)
        of its new tokens."""
        caps = []
        for seen, held in zip(layer.lengths, layer.rows_held, strict=True):
            past = held - appended
            there = seen + 1 - appended
            limit = resolve_budget(self.budget, min(there, layer.local or there))
            caps.append(past if limit is None else min(limit, past))
        return caps

    def select(self, layer, query: Tensor) -> Tensor | None:
        past = layer.slots - 1
        if self.whole(layer.index) or past < 1:
            return None
        host = torch.device("cpu")  # where the keys are
        keys, _ = layer.store.read(host)
        positions = None if layer.some_empty is None else layer.some_empty[..., :-1].to(host)
        scores = true_scores(query.to(host), keys[:, :, :past], layer.scaling, positions, layer.softcap)
        importance = group_importance(scores, keys.shape[1], layer.sinks)
        slots = most_important(importance, self.caps(layer, appended=1))
        return slots.to(query.device)
