"""Skipping: leave some layers exact beside the format of the others."""

from __future__ import annotations

from ..parameters import check_kind
from .growing import Growing, GrowingState


class Skipping(Growing):
    """Hold K and V of some layers as they are, and those of the others in a store.

    The first and the last layers of many models lose most when they are rounded, and there are few of them:
    vLLM leaves the first and the last two exact where it rounds to 3 or 4 bits.

    store: of the other layers. layers: the numbers of those that stay exact, counted among the layers that
    attend, from 0 on, or from the last one back: -1. ValueError for a layer that the model has not.
    """

    def __init__(self, store: Growing, layers: tuple[int, ...]):
        check_kind("store", store, Growing, "a buffer such as Growing()")
        check_kind("layers", layers, list | tuple, "numbers of layers")
        for number in layers:
            check_kind("layers", number, int, "numbers of layers")
        super().__init__(store.format, store.values, store.sinks)
        self.store, self.layers = store, tuple(layers)

    def of(self, order: int, layers: int) -> Growing:
        for number in self.layers:
            if not -layers <= number < layers:
                raise ValueError(f"skip_layers={number}: the model has {layers} layers")
        return Growing() if order in {number % layers for number in self.layers} else self.store

    def start(self, layer) -> GrowingState:
        return self.of(layer.order, layer.shape.layers).start(layer)
