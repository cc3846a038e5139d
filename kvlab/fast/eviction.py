"""Eviction: which tokens leave in a step through all layers in one call, and how the layers record it."""

from __future__ import annotations

import numpy as np
import torch

from .known import NEWEST, SUM, may_go
from .layers import TABLES
from .step import PER_EMPTY


class Eviction:
    """The tokens that leave in a step, in all of these layers in the same way: `told` has the arguments for
    `layers.py`.

    how: as `step.way` says it. Slots are read where the layers have them, and what comes of them is
    written to tensors of its own.
    """

    def __init__(self, held, how: int, heads: int):
        self.how = how
        rows, kv_heads = len(held[0].lengths), held[0].kv_heads
        tables, rules = np.zeros((len(held), TABLES), np.int64), np.zeros((len(held), rows, 3), np.int64)
        self.layers = [self._of(layer, rules[index]) for index, layer in enumerate(held if how else ())]
        if how:
            tables[:] = [list(map(_address, one)) for one in self.layers]
        most = 1 + max(layer.slots for layer in held) if how else 0
        slots = rows * kv_heads * most
        watched = slots if how in (SUM, NEWEST) else 0
        room = [np.empty(count, np.float32) for count in (watched // kv_heads * heads, watched)]
        self.told = how, tables, rules, np.empty(slots, np.bool_), *room, np.empty(most, np.int32)

    def _of(self, layer, rules: np.ndarray) -> tuple:
        """Positions and sums `[rows, kv_heads, slots]` before the step, after it, and when slots have closed
        up; to how many they close up. 0: there is no such thing."""
        slots, left = layer.slots + 1, layer.keep.longest[0]
        closes = (slots - left) * PER_EMPTY > slots
        shape = len(layer.lengths), layer.kv_heads
        rules[:, 0], rules[:, 1] = may_go(layer)
        rules[:, 2] = layer.lengths
        before = layer.slot_positions.contiguous(), layer.keep.received.contiguous() if self.how == SUM else 0
        room = lambda n: (
            torch.empty(*shape, n, dtype=torch.int32, device="cpu"),
            torch.empty(*shape, n, dtype=torch.float32, device="cpu") if self.how == SUM else 0,
        )
        return *before, *room(slots), *(room(left) if closes else (0, 0)), left if closes else 0

    def done(self, index: int, layer, scaling: float) -> None:
        """The step has been made: update the layer."""
        left = None
        if self.how:
            *_, left, sums, closed, closed_sums, count = self.layers[index]
            if count:
                left, sums = closed, closed_sums
            if self.how == SUM:
                layer.keep.received = sums
        layer.taken(scaling, left)
        layer.store.filled = layer.slots


def _address(x) -> int:
    """Of a tensor; a number stays."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else x
