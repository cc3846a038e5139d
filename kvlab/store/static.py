"""Static: one buffer allocated once and written in place."""

from __future__ import annotations

from ..policy import check_whole, with_room
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
        if length is not None:
            check_whole("length", length, 1)
        self.capacity = length

    def start(self, layer) -> StaticState:
        super().start(layer)
        capacity = self.capacity or layer.shape.context
        if capacity is None:
            raise ValueError("length: this model states no context length, so name one")
        return StaticState(self, capacity)


class StaticState(GrowingState):
    """Buffers `[batch, kv_heads, capacity, width]`, of which the first `filled` slots are in use."""

    def __init__(self, policy: Growing, capacity: int):
        super().__init__(policy)
        self.capacity, self.filled = capacity, 0

    @property
    def length(self) -> int:
        return self.filled

    @property
    def max_length(self) -> int:
        return self.capacity

    def add(self, keys: Parts, values: Parts) -> None:
        end = self.filled + keys[0].shape[2]
        if end > self.capacity:
            raise ValueError(f"static: {end} tokens do not fit into a buffer of length={self.capacity}")
        if self.keys is None:
            self.keys, self.values = self._allocate(keys), self._allocate(values)
        for buffer, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
            buffer[:, :, self.filled : end] = new
        self.filled = end

    def parts(self) -> tuple[Parts, Parts]:
        return tuple(tuple(part[:, :, : self.filled] for part in parts) for parts in (self.keys, self.values))

    def _allocate(self, parts: Parts) -> Parts:
        """Buffers for parts like these that begin with the `filled` slots; pinned where these are, so that a
        GPU can read them."""
        return tuple(with_room(p[:, :, : self.filled], self.capacity, p.is_pinned()) for p in parts)
