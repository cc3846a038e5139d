"""Static: one buffer allocated once and written in place (document 000)."""

from __future__ import annotations

from torch import Tensor

from ..answer import gather_slots
from .format import Exact
from .growing import Growing


class Static(Growing):
    """Allocate `length` slots at the first token and write every new token into the next free one.

    No copy of what is held at any step; the price is memory reserved from the start. Reading gives a view
    of the slots in use.

    length: tokens to reserve per row (default: the model's context).
    format, values, sinks: as in `Growing`. Raises ValueError when more than `length` tokens are to be held.
    """

    per_slot = ()  # the buffers keep their size; see keep_slots and crop

    def __init__(
        self,
        length: int | None = None,
        format: Exact | None = None,
        values: Exact | None = None,
        sinks: int = 0,
    ):
        super().__init__(format, values, sinks)
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"length={length!r}: expected a positive number of tokens")
        self.capacity, self.used = length, 0

    def bind(self, shape, layer: int, model=None) -> None:
        super().bind(shape, layer, model)
        self.capacity = self.capacity or shape.context
        if self.capacity is None:
            raise ValueError("length: this model states no context length, so name one")

    @property
    def length(self) -> int:
        return self.used

    @property
    def max_length(self) -> int:
        """Tokens that it can ever hold."""
        return self.capacity

    def add(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        end = self.used + keys[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"static: {end} tokens do not fit into a buffer of length={self.capacity}")
        if self.keys is None:
            self.keys, self.values = self._allocate(keys), self._allocate(values)
        for buffer, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            buffer[:, :, self.used : end] = new
        self.used = end

    def _allocate(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Empty buffers like these parts; pinned where these are, so that a GPU can read them."""
        shapes = [(*part.shape[:2], self.capacity, part.shape[3]) for part in parts]
        return tuple(p.new_empty(s, pin_memory=p.is_pinned()) for p, s in zip(parts, shapes, strict=True))

    def _used(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(part[:, :, : self.used] for part in parts)

    def select_rows(self, rows: Tensor) -> None:
        if self.keys is None:
            return
        self.follow("select_rows", rows)
        kept = [part.index_select(0, rows.to(part.device)) for part in self._used((*self.keys, *self.values))]
        fresh = self._allocate(tuple(kept))
        for buffer, part in zip(fresh, kept, strict=True):
            buffer[:, :, : self.used] = part
        self.keys, self.values = fresh[: len(self.keys)], fresh[len(self.keys) :]

    def keep_slots(self, slots: Tensor) -> None:
        self.used = slots.shape[2]
        for buffer in (*self.keys, *self.values):
            buffer[:, :, : self.used] = gather_slots(buffer, slots)
        self.follow("keep_slots", slots)

    def crop(self, length: int) -> None:
        self.used = min(self.used, length)
        self.follow("crop", length)


class Roomy(Static):
    """A static buffer that makes room: when it is full, everything is copied into one half as long again.

    So a step copies nothing but its own token, most of the time, and the length need not be known before.
    The price is up to a third of the buffer unused. It is what a host that feeds a link holds.

    room: tokens reserved at first beyond the prompt. format, values: as in `Growing`.
    """

    def __init__(self, format: Exact | None = None, room: int = 64, values: Exact | None = None):
        if not isinstance(room, int) or room < 1:
            raise ValueError(f"room={room!r}: expected a positive number of tokens")
        super().__init__(room, format, values)
        self.room = room

    @property
    def max_length(self) -> int:
        return -1  # no limit

    def add(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        end = self.used + keys[0].shape[2]
        if self.keys is None:
            self.capacity = end + self.room
        elif end > self.capacity:
            self.capacity = max(end, self.capacity + self.capacity // 2)
            old = self._used((*self.keys, *self.values))
            new = self._allocate(old)
            for buffer, part in zip(new, old, strict=True):
                buffer[:, :, : self.used] = part
            self.keys, self.values = new[: len(self.keys)], new[len(self.keys) :]
        super().add(keys, values)
