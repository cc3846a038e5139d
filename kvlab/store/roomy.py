"""Roomy: a static buffer that makes room when it is full."""

from __future__ import annotations

from ..policy import check_whole
from .exact import Parts
from .growing import Growing
from .static import StaticState


class Roomy(Growing):
    """A static buffer that makes room: when it is full, everything is copied into one half as long again.

    So a step copies nothing but its own token, most of the time, and the length need not be known before.
    The price is up to a third of the buffer unused. It is what a host that feeds a link holds.

    room: tokens reserved at first beyond the prompt. format, values: as in `Growing`.
    """

    def __init__(self, format=None, room: int = 64, values=None):
        check_whole("room", room, 1)
        super().__init__(format, values)
        self.room = room

    def start(self, layer) -> RoomyState:
        super().start(layer)
        return RoomyState(self, 0)


class RoomyState(StaticState):
    """As `StaticState`, with a capacity that grows."""

    max_length = -1  # no limit

    def add(self, keys: Parts, values: Parts) -> None:
        if self.keys is None:
            self.capacity = keys[0].shape[2] + self.policy.room
        super().add(keys, values)

    def reserve(self, tokens: int) -> None:
        end = self.filled + tokens
        if end > self.capacity:
            self.capacity = max(end, self.capacity + self.capacity // 2)
            self._lengthen(self.capacity)
