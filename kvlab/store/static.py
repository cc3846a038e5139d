"""Static: one buffer allocated once and written in place."""

from __future__ import annotations

from torch import Tensor

from ..policy import gather_slots
from .exact import Parts
from .growing import Growing, GrowingState


class Static(Growing):
    """Allocate `length` slots at the first token and write every new token into the next free one.

    No copy of what is held at any step; the price is memory reserved from the start. Reading gives a view
    of the slots in use.

    length: tokens to reserve per row (default: the model's context).
    format, values, sinks: as in `Growing`. Raises ValueError when more than `length` tokens are to be held.
    """

    def __init__(self, length: int | None = None, format=None, values=None, sinks: int = 0):
        super().__init__(format, values, sinks)
        if length is not None and (not isinstance(length, int) or length < 1):
            raise ValueError(f"length={length!r}: expected a positive number of tokens")
        self.capacity = length

    def start(self, layer) -> StaticState:
        super().start(layer)
        capacity = self.capacity or layer.shape.context
        if capacity is None:
            raise ValueError("length: this model states no context length, so name one")
        return StaticState(self, capacity)


class StaticState(GrowingState):
    """Buffers `[batch, kv_heads, capacity, width]`, of which the first `used` slots are in use."""

    per_slot = ()  # the buffers keep their size; see keep_slots and crop
    per_row = ("keys", "values", *GrowingState.per_row)

    def __init__(self, policy: Growing, capacity: int):
        super().__init__(policy)
        self.capacity, self.used = capacity, 0

    @property
    def length(self) -> int:
        return self.used

    @property
    def max_length(self) -> int:
        return self.capacity

    def add(self, keys: Parts, values: Parts) -> None:
        end = self.used + keys[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"static: {end} tokens do not fit into a buffer of length={self.capacity}")
        if self.keys is None:
            self.keys, self.values = self._allocate(keys), self._allocate(values)
        for buffer, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            buffer[:, :, self.used : end] = new
        self.used = end

    def parts(self) -> tuple[Parts, Parts]:
        return self._in_use(self.keys), self._in_use(self.values)

    def _in_use(self, parts: Parts) -> Parts:
        return tuple(part[:, :, : self.used] for part in parts)

    def _allocate(self, parts: Parts) -> Parts:
        """Empty buffers like these parts; pinned where these are, so that a GPU can read them."""
        shapes = [(*part.shape[:2], self.capacity, part.shape[3]) for part in parts]
        return tuple(p.new_empty(s, pin_memory=p.is_pinned()) for p, s in zip(parts, shapes, strict=True))

    def select_rows(self, rows: Tensor) -> None:
        used = None if self.keys is None else self.parts()
        self.keys = self.values = None
        super().select_rows(rows)
        if used is not None:
            self.keys, self.values = (self._copied(parts, rows) for parts in used)

    def _copied(self, parts: Parts, rows: Tensor) -> Parts:
        """Fresh buffers with some rows of the slots in use."""
        kept = tuple(part.index_select(0, rows.to(part.device)) for part in parts)
        fresh = self._allocate(kept)
        for buffer, part in zip(fresh, kept, strict=True):
            buffer[:, :, : self.used] = part
        return fresh

    def keep_slots(self, slots: Tensor) -> None:
        super().keep_slots(slots)
        self.used = slots.shape[2]
        for buffer in (*self.keys, *self.values):
            buffer[:, :, : self.used] = gather_slots(buffer, slots)

    def crop(self, length: int) -> None:
        super().crop(length)
        self.used = min(self.used, length)
