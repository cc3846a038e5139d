"""OnDemand: unified memory, where pages cross the link when they are touched (document 001, "UVM")."""

from __future__ import annotations

from .host import Fetch


class OnDemand(Fetch):
    """Everything is fetched at the moment it is read, page by page, and nothing ahead of time.

    A model of NVIDIA's unified memory: while the cache fits into `memory` it stays on the device once it is
    there; a larger one is read in a cycle, layer after layer, so that a least-recently-used device memory has
    always just dropped what comes next, and every page faults at every step.

    memory: tokens (or a fraction of the longest row's prompt) whose K and V the device can hold in every
    layer. page: bytes that cross together (64 KiB: the driver's unit). fault: seconds that a page's fault
    costs besides its transfer.
    """

    def __init__(self, memory: float | int = 0.5, page: int = 65536, fault: float = 2e-6):
        if not isinstance(memory, int | float) or not memory >= 0:
            raise ValueError(f"memory={memory!r}: expected tokens, or a fraction of the prompt, 0 or more")
        if not isinstance(page, int) or page < 1:
            raise ValueError(f"page={page!r}: expected a positive number of bytes")
        if not isinstance(fault, int | float) or not fault >= 0:
            raise ValueError(f"fault={fault!r}: expected seconds, 0 or more")
        self.memory, self.page, self.fault = memory, page, fault
        self._limit = 0.0  # tokens, known after the prefill
        self._there = False  # whether the layer's tokens have been touched since they fit

    def prefill(self, layer, query, keys) -> None:
        self._limit = self.memory * max(layer.lengths) if self.memory <= 1 else self.memory

    def resident(self, layer) -> bool:
        fits = max(layer.rows_held) <= self._limit
        there, self._there = self._there, fits
        return fits and there
