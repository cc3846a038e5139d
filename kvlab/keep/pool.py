"""Pool: a host memory of limited capacity, and which token leaves it (InfiniGen, Lee et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..gather import among
from ..parameters import check_fraction_or_count, check_one_of
from ..policy import State
from .base import Keep

VICTIMS = ("counter", "lru", "fifo")


class Pool(Keep):
    """Keep as many tokens as the capacity allows; victims come from the older half of the tokens held.

    "fifo": the oldest. "lru": the one whose last fetch is longest ago. "counter": the one fetched least
    often. Ties: the oldest. A token counts as fetched if the place offered it to attention; a layer that
    fetches everything uses every token. Victims are chosen per KV head, and a victim is gone for good.

    capacity: tokens held in every head; a fraction is of the row's own prompt length (1: no limit). turns:
    see `Keep`.
    State: `last_used` (step of the last fetch) and `count` (fetches), `[batch, kv_heads, slots]`; `step`;
    `seen`, the tokens that each row had seen: without a new one, a row fetches nothing.
    """

    per_row, per_slot = ("seen",), ("last_used", "count")

    def __init__(self, capacity: float | int = 0.8, policy: str = "counter", turns: str = "all"):
        super().__init__(check_fraction_or_count("capacity", capacity), turns=turns)
        check_one_of("policy", policy, VICTIMS)
        self.victim = policy

    def start(self, layer) -> State:
        state = super().start(layer)
        state.step = 0
        return state

    def observe(self, layer, received: Tensor | None) -> None:
        """Count the fetches of the pass that just ended."""
        state, fetched = layer.state, torch.ones_like(layer.slot_positions)
        if state.count is None:
            state.last_used = state.count = torch.zeros_like(fetched)
            state.seen = [0] * len(fetched)
        new = fetched.shape[2] - state.count.shape[2]
        if layer.fetched is not None:
            fetched = among(layer.fetched, layer.slots).to(fetched.dtype)
            fetched[..., state.count.shape[2] :] = 1
        fed = [now > then for now, then in zip(layer.lengths, state.seen, strict=True)]
        fetched *= torch.tensor(fed, device=fetched.device)[:, None, None]
        state.step, state.seen = state.step + 1, list(layer.lengths)
        state.last_used = torch.where(fetched > 0, state.step, pad(state.last_used, (0, new)))
        state.count = pad(state.count, (0, new)) + fetched

    def score(self, layer) -> Tensor:
        positions, state = layer.slot_positions.long(), layer.state
        value = {"fifo": positions, "lru": state.last_used, "counter": state.count}[self.victim].long()
        held = (positions >= 0).sum(-1, keepdim=True)
        age = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max).argsort(-1).argsort(-1)
        older = age < (held + 1) // 2
        value = torch.where(older, value, value.amax() + 1)
        span = int(positions.amax()) + 2
        return (value * span + positions).argsort(-1).argsort(-1)  # ties: the oldest has the lowest score
