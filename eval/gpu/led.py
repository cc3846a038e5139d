"""Led: a CPU run takes over a device's codes and fetches, and reports where it would have differed.

A number between two codes may be rounded to either. The difference that follows is no error of later steps,
so a run that is compared with another one stores that one's codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.place.synchronous import HostState
from kvlab.store import Exact

TIE = 0.02  # of the way between two codes: as near as this to their middle, rounding decides
ULPS = 2.0**-9  # of a number: what the last digit of an fp16 scale may make of it


class Led:
    """The codes and fetched slots of a run, as they come; one that is given a `leader` takes over that one's.

    numbers: how many were stored as codes; differ: how many of them the leader stored as another number;
    apart: how many of these were no tie, which is an error. sets: how many choices of slots to fetch were
    other ones.
    """

    def __init__(self, leader: Led | None = None):
        self.codes: list[tuple[Tensor, ...]] = []
        self.slots: list[Tensor | None] = []
        self.leader = leader
        self.numbers = self.differ = self.apart = self.sets = 0
        self._stored = self._chosen = 0

    @property
    def leads(self) -> bool:
        """Whether there is anything to take over."""
        return bool(self.codes) or any(slots is not None for slots in self.slots)

    @property
    def held(self) -> list:
        """The positions of the tokens that every layer holds."""
        return [layer.positions.tolist() for layer in self.layers]

    def watch(self, cache) -> None:
        """Watch a new cache's layers, in the plain code, where every token is appended by itself."""
        self.layers = cache.attending
        for layer in cache.attending:
            layer.on_read = lambda *given: None
            if type(layer.store.format) is not Exact:
                self._watch_store(layer.store)
            if isinstance(layer.place, HostState):
                self._watch_fetch(layer.place)

    def _watch_store(self, store) -> None:
        append, given = store.append, []

        def watched(keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
            append(keys, values, real)
            given.append((keys, values))
            parts = coded(store)
            if self.leader is None:
                self.codes.append(tuple(part.cpu() for part in parts))
                return
            own = store.read(keys.device)
            for part, other in zip(parts, self.leader.codes[self._stored], strict=True):
                part.copy_(other)
            self._stored += 1
            self.numbers += keys.numel() + values.numel()
            for numbers, mine, theirs in zip(
                zip(*given, strict=True), own, store.read(keys.device), strict=True
            ):
                self._compare(torch.cat(numbers, 2), mine, theirs, store.in_blocks)

        store.append = watched

    def _compare(self, x: Tensor, own: Tensor, theirs: Tensor, in_blocks: bool) -> None:
        """Numbers, and what they are stored as here and there."""
        x, own, theirs = (one[:, :, -len(x[0, 0]) :].double() for one in (x, own, theirs))
        size, step = x.abs(), (own - theirs).abs()
        size = (
            size.amax((2, 3), keepdim=True) if in_blocks else size
        )  # zero points are as large as any number
        gap = ((x - own).abs() - (x - theirs).abs()).abs()
        self.differ += int((step > 0).sum())
        self.apart += int((gap > TIE * step + ULPS * size).sum())

    def _watch_fetch(self, place) -> None:
        select = place.select

        def watched(layer, query: Tensor) -> Tensor | None:
            slots = select(layer, query)
            if self.leader is None:
                self.slots.append(None if slots is None else slots.cpu())
                return slots
            theirs = self.leader.slots[self._chosen]
            self._chosen += 1
            if slots is not None and theirs is not None:
                self.sets += not slots.sort(-1).values.equal(theirs.sort(-1).values)
            else:
                self.sets += slots is not theirs
            return theirs

        place.select = watched


def coded(store) -> tuple[Tensor, ...]:
    """What a store has written down, in tensors that may be written to."""
    keys, values = store.used()
    return () if keys is None else (*keys, *values, *(getattr(store, "blocks", None) or ()))
