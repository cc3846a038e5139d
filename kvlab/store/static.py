"""Static: one buffer allocated once and written in place."""

from __future__ import annotations

from torch import Tensor

from ..gather import with_room
from ..parameters import check_whole, check_within
from .exact import Parts
from .growing import Growing, GrowingState


class Static(Growing):
    """Allocate `length` slots at the first token and write every new token into the next free one.

    No step copies the cache; the price is memory reserved from the start. Reading gives a view
    of the slots in use.

    length: tokens to reserve per row (default: the model's context).
    format, values, sinks: as in `Growing`. Raises ValueError when more than `length` tokens are to be held.
    """

    def __init__(self, length: int | None = None, format=None, values=None, sinks: int = 0):
        super().__init__(format, values, sinks)
        if length is not None:
            check_whole("length", length, 1)
        self.capacity = length

    def reserved(self, held: int, context: int) -> int:
        slots = self.capacity or context
        if held > slots:
            raise ValueError(f"{held} tokens do not fit into a buffer of length={slots}")
        return slots

    def start(self, layer) -> StaticState:
        super().start(layer)
        check_within("length", self.capacity, layer.shape.context)
        capacity = self.capacity or layer.shape.context
        if capacity is None:
            raise ValueError("length: this model states no context length, so name one")
        return StaticState(self, capacity)


class StaticState(GrowingState):
    """Buffers `[batch, kv_heads, capacity, width]`, which stay as long as they are."""

    keeps_room = True

    def __init__(self, policy: Growing, capacity: int):
        super().__init__(policy)
        self.capacity = capacity

    @property
    def max_length(self) -> int:
        return self.capacity

    @property
    def spare_bytes(self) -> int:
        return 0  # what is reserved is what the policy says

    def encode(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> tuple[Parts, Parts]:
        self.reserve(keys.shape[2])  # refuses before anything is noted
        return super().encode(keys, values, real)

    def add(self, keys: Parts, values: Parts) -> None:
        if self.keys is None:
            self.keys, self.values = (tuple(x[:, :, :0] for x in parts) for parts in (keys, values))
            self._lengthen(self.capacity)
        super().add(keys, values)

    def reserve(self, tokens: int) -> None:
        end = self.filled + tokens
        if end > self.capacity:
            raise ValueError(f"static: {end} tokens do not fit into a buffer of length={self.capacity}")

    def refill(self, contents: dict) -> None:
        super().refill(contents)
        if self.keys is not None:
            self.reserve(0)
            both = self.keys, self.values
            self.keys, self.values = (tuple(with_room(x, self.capacity) for x in parts) for parts in both)
