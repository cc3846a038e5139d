"""OnDemand: unified memory, where pages cross the link when they are touched ("UVM" in Lee et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..parameters import check_number, check_whole
from ..policy import State
from .fetch import Fetch


@dataclass(frozen=True)
class OnDemand(Fetch):
    """Everything is fetched when it is read, page by page, and nothing ahead of time.

    A model of NVIDIA's unified memory: a cache that fits into `memory` stays on the device after its first
    read; a larger one is read in a cycle, layer after layer, so a least-recently-used memory has always just
    dropped the next page, and every page faults at every step.

    memory: tokens (or a fraction of the longest row's prompt) whose K and V the device can hold in every
    layer. page: bytes that cross together (64 KiB: the driver's unit). fault: seconds that a page fault costs
    in addition to its transfer. Tokens on the device between two steps, up to `memory`, count as device
    bytes.
    State: `limit` (tokens, known after the prefill), `read` (whether any step has) and `touched` (since they
    fit).
    """

    memory: float | int = 0.5
    page: int = 65536
    fault: float = 2e-6

    stays, chooses = True, False

    def __post_init__(self):
        finite = lambda x: 0 <= x < math.inf
        check_number("memory", self.memory, finite, "tokens, or a fraction of the prompt, 0 or more")
        check_whole("page", self.page, 1, "bytes")
        check_number("fault", self.fault, finite, "seconds, 0 or more")

    def start(self, layer) -> State:
        state = super().start(layer)
        state.limit, state.touched, state.read = 0.0, False, False
        return state

    def prefill(self, layer, query, keys) -> None:
        layer.state.limit = self.memory * max(layer.lengths) if self.memory <= 1 else self.memory

    def extend(self, layer, query, keys) -> None:
        if layer.in_prompt:
            self.prefill(layer, query, keys)

    def on_device(self, layer) -> bool:
        fits, layer.state.read = max(layer.rows_held) <= layer.state.limit, True
        touched, layer.state.touched = layer.state.touched, fits
        return fits and touched

    def resident(self, layer) -> float:
        return min(1.0, layer.state.limit / max(layer.rows_held)) if layer.state.read else 0.0
