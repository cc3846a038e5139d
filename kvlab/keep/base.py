"""Keep: which tokens stay. The base class ranks them; a method says by what."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer, check_fraction_or_count, resolve_budget


class Keep(Answer):
    """Hold on to the `budget` tokens with the highest `score`, row by row and head by head.

    A new method overrides `score`, and sets `watches = True` if it wants to `observe` attention.

    budget: tokens held; a fraction is of the row's own prompt length, fixed after the prefill; 1 keeps all.
    """

    watches = False  # True: `observe` is called with the attention that every slot received ...
    last_queries: int | None = None  # ... in the prompt, from so many of its last queries (None: all)

    def __init__(self, budget: float | int = 0.2):
        self.budget = check_fraction_or_count("budget", budget)
        self.limits: list[int] | None = None  # tokens each row may hold, known after the prefill

    @property
    def evicts(self) -> bool:
        return self.budget != 1

    def observe(self, received: Tensor) -> None:
        """`received` `[batch, kv_heads, slots]`: attention weight each slot got in this pass, summed over
        the queries and averaged over the query heads of the group."""

    def score(self, layer) -> Tensor:
        """Importance of every slot, `[batch, kv_heads, slots]`; ties go to the older token.

        `layer` offers `slot_positions` `[batch, kv_heads, slots]` (-1: empty), `lengths` (tokens seen per
        row) and `store.read(device)`.
        """
        raise TypeError(f"{type(self).__name__} must say how it scores tokens: define score(layer)")

    def choose(self, layer) -> Tensor | None:
        """Slots that stay, `[batch, kv_heads, n]` in order of position, -1 where a row holds fewer;
        None when nothing has to go."""
        if self.limits is None:  # the first pass: the prompt
            self.limits = [resolve_budget(self.budget, tokens) for tokens in layer.lengths]
        limits = self.limits
        if all(held <= limit for held, limit in zip(layer.rows_held, limits, strict=True)):
            return None
        positions = layer.slot_positions
        score = self.score(layer).float()
        slots = positions.shape[2]
        if all(slots == held == limit + 1 for held, limit in zip(layer.rows_held, limits, strict=True)):
            return _all_but_the_lowest(score)  # the usual decode step
        score = score.masked_fill(positions < 0, -torch.inf)
        order = score.argsort(dim=-1, descending=True, stable=True)[..., : max(limits)]
        rank = torch.arange(order.shape[-1], device=order.device)
        limit = torch.tensor(limits, device=order.device).view(-1, 1, 1)
        stays = (rank < limit) & (positions.gather(2, order) >= 0)
        chosen = order.masked_fill(~stays, slots).sort(dim=-1).values
        return chosen.masked_fill(chosen == slots, -1)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        if self.limits is not None:
            self.limits = [self.limits[row] for row in rows.tolist()]


def _all_but_the_lowest(score: Tensor) -> Tensor:
    """All slots but the one with the lowest score, the last of them if it is a tie."""
    slots = score.shape[-1]
    lowest = slots - 1 - score.flip(-1).argmin(dim=-1, keepdim=True)
    index = torch.arange(slots - 1, device=score.device)
    return index + (index >= lowest)


class KeepAll(Keep):
    """Every token stays."""

    def __init__(self):
        super().__init__(budget=1)
