"""Pool: a host memory of limited capacity, and which token leaves it (InfiniGen, Lee et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import check_fraction_or_count
from .base import Keep

POLICIES = ("counter", "lru", "fifo")


class Pool(Keep):
    """Keep what the capacity allows; a victim is chosen among the older half of the tokens held.

    "fifo": the oldest. "lru": the one whose last fetch is longest ago. "counter": the one fetched least
    often. Ties: the oldest. What counts as fetched is what the place offered to attention; a layer that
    fetches everything uses every token. Victims are chosen per KV head, and a victim is gone for good.

    capacity: tokens held in every head; a fraction is of the row's own prompt length (1: no limit). unit:
    "tokens", or "bytes" for a capacity in bytes of K and V of all rows, layers and heads together.
    """

    per_slot = ("used", "count")

    def __init__(self, capacity: float | int = 0.8, policy: str = "counter", unit: str = "tokens"):
        super().__init__(check_fraction_or_count("capacity", capacity))
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
        if unit not in ("tokens", "bytes"):
            raise ValueError(f"unit={unit!r}: expected tokens or bytes")
        if unit == "bytes" and isinstance(self.budget, float):
            raise ValueError(f"capacity={capacity!r}: expected a whole number of bytes")
        self.policy, self.unit = policy, unit
        self.step = 0
        self.used: Tensor | None = None  # [batch, kv_heads, slots]: step of the last fetch
        self.count: Tensor | None = None  # [batch, kv_heads, slots]: fetches

    def bind(self, shape, layer: int, model=None) -> None:
        self._heads = shape.layers * shape.kv_heads

    def choose(self, layer) -> Tensor | None:
        if self.limits is None and self.unit == "bytes":
            token = self._heads * layer.store.bytes_per_slot * len(layer.lengths)
            if self.budget < 2 * token:
                raise ValueError(f"capacity={self.budget}: expected room for two tokens, {2 * token} bytes")
            self.limits = [self.budget // token] * len(layer.lengths)
        self._note(layer)
        return super().choose(layer)

    def _note(self, layer) -> None:
        """Count the fetches of the pass that just ended."""
        positions, self.step = layer.slot_positions, self.step + 1
        new = positions.shape[2] - (0 if self.used is None else self.used.shape[2])
        fresh = torch.zeros(*positions.shape[:2], new, dtype=torch.int32, device=positions.device)
        self.used = fresh if self.used is None else torch.cat([self.used, fresh], dim=2)
        self.count = fresh.clone() if self.count is None else torch.cat([self.count, fresh], dim=2)
        fetched = torch.ones_like(self.used)
        if layer.fetched is not None:
            there = (layer.fetched >= 0).to(fetched.dtype)
            fetched.zero_().scatter_reduce_(2, layer.fetched.clamp(min=0), there, "amax")
            fetched[..., -new:] = 1
        self.used = torch.where(fetched > 0, self.step, self.used).to(torch.int32)
        self.count = self.count + fetched

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions.long()
        value = {"fifo": positions, "lru": self.used.long(), "counter": self.count.long()}[self.policy]
        held = (positions >= 0).sum(-1, keepdim=True)
        age = positions.masked_fill(positions < 0, torch.iinfo(torch.int64).max).argsort(-1).argsort(-1)
        older = age < (held + 1) // 2
        value = torch.where(older, value, value.amax() + 1)
        span = int(positions.amax()) + 2
        return (value * span + positions).argsort(-1).argsort(-1)  # ties: the oldest has the lowest score
