"""Roomy: a static buffer that makes room when it is full."""

from __future__ import annotations

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
        if not isinstance(room, int) or room < 1:
            raise ValueError(f"room={room!r}: expected a positive number of tokens")
        super().__init__(format, values)
        self.room = room

    def start(self, layer) -> RoomyState:
        super().start(layer)
        return RoomyState(self, 0)


class RoomyState(StaticState):
    """As `StaticState`, with a capacity that grows."""

    max_length = -1  # no limit

    def add(self, keys: Parts, values: Parts) -> None:
        end = self.used + keys[0].shape[2]
        if self.keys is None:
            self.capacity = end + self.policy.room
        elif end > self.capacity:
            self.capacity = max(end, self.capacity + self.capacity // 2)
            old_keys, old_values = self.parts()
            self.keys, self.values = self._allocate(old_keys), self._allocate(old_values)
            for buffer, old in zip((*self.keys, *self.values), (*old_keys, *old_values), strict=True):
                buffer[:, :, : self.used] = old
        super().add(keys, values)
