"""Skipping: leave some layers exact and round the others."""

from __future__ import annotations

from ..parameters import check_kind
from .growing import Growing, GrowingState


class Skipping(Growing):
    """Hold K and V of some layers exactly, and those of the others in a store.

    In many models the first and last layers lose most when they are rounded, and they are few: vLLM leaves
    the first and the last two exact when it rounds to 3 or 4 bits.

    store: of the other layers. layers: the numbers of those that stay exact, counted among the layers that
    attend, from 0, or from the last one back: -1. ValueError for a layer that the model does not have.
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
