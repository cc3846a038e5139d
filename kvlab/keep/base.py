"""Keep: which tokens stay. The base class ranks them; a method says by what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..policy import Policy, State, check_fraction_or_count, resolve_budget

FINITE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max  # infinity is the newest token's


@dataclass(frozen=True)
class Keep(Policy):
    """Hold on to the `budget` tokens with the highest `score`, row by row and head by head.

    A new method overrides `score`. The newest token is held whatever its score. A method that wants to
    `observe` attention sets `watches = True` and names in `per_slot` (or `per_row`) what it remembers:
    `layer.state` then has it, and it follows the tokens. A dataclass where there are parameters besides
    `budget` (`keep/sinks.py`), a plain class where there are none (`keep/tova.py`).

    budget: tokens held; a fraction is of the row's own prompt length, fixed after the prefill; 1 keeps all.
    """

    budget: float | int = 0.2

    watches = False  # True: `observe` is called with the attention that every slot received ...
    last_queries = None  # ... in the prompt, from so many of its last queries (None: all)
    once = False  # True: the prompt is compressed, and what is written after it stays
    per_row = ()  # names in the state: tensors [batch, ...], or lists with an entry for each row
    per_slot = ()  # names in the state: tensors [batch, kv_heads, slots, ...]

    def __post_init__(self):
        object.__setattr__(self, "budget", check_fraction_or_count("budget", self.budget))

    @property
    def evicts(self) -> bool:
        return self.budget != 1

    def start(self, layer) -> State:
        """`limits`: tokens that each row may hold, known after the prefill, and what the method declares."""
        return State(self, (*self.per_row, "limits"), self.per_slot)

    def observe(self, layer, received: Tensor) -> None:
        """`received` `[batch, kv_heads, slots]`: attention weight each slot got in this pass, summed over
        the queries and averaged over the query heads of the group."""

    def score(self, layer) -> Tensor:
        """Importance of every slot, `[batch, kv_heads, slots]`; ties go to the older token.

        `layer` is a `View`. A score can be made from the attention received (what `observe` wrote to
        `layer.state`), from `layer.slot_positions` `[batch, kv_heads, slots]` (-1: empty) and `layer.lengths`
        (tokens seen per row), or from the keys:
        `keys, values = layer.store.read(layer.slot_positions.device)`, `[batch, kv_heads, slots, head_dim]`
        each, decoded; on a host this brings all of both to the device at every pass, which is not counted as
        moved. Scores that differ by rounding only must be made equal (`score.round(decimals=3)`), or a padded
        batch and a single row choose differently. What an empty slot scores does not matter.
        """
        raise TypeError(f"{type(self).__name__} must say how it scores tokens: define score(layer)")

    def limits(self, layer) -> list[int]:
        """Tokens that each row may hold after its prompt."""
        return [resolve_budget(self.budget, tokens) for tokens in layer.lengths]

    def choose(self, layer) -> Tensor | None:
        """Slots that stay, `[batch, kv_heads, n]` in order of position, -1 where a row holds fewer; None when
        nothing has to go. The newest token always stays."""
        if layer.state.limits is None:  # the first pass: the prompt
            layer.state.limits = self.limits(layer)
        elif self.once:
            return None
        limits = layer.state.limits
        if all(held <= limit for held, limit in zip(layer.rows_held, limits, strict=True)):
            return None
        positions = layer.slot_positions
        newest = positions == positions.amax(-1, keepdim=True)
        score = self.score(layer).float().clamp(*FINITE).masked_fill(newest, torch.inf)
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
