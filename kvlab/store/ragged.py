"""Ragged: the heads of a layer hold different numbers of tokens, one head after another in one tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from ..gather import gather_slots
from ..parameters import check_kind
from ..policy import State
from .exact import Exact, Parts
from .growing import Growing, GrowingState


class Ragged(Growing):
    """After an eviction the kept tokens are stored flat, row by row and head by head, without padding; later
    tokens are appended as in `Growing`, since every head gets every new token.

    Nothing is reserved: the storage of K and V is exactly the tokens that the heads hold. Slots are numbered
    as if all heads were as long as the longest one, so the table of positions, 4 bytes for each slot and
    head, is padded, and a step attends to a temporary padded copy of its layer. The next eviction rewrites
    everything.

    format, values, sinks: as in `Growing`.
    """

    takes_ragged = True

    def start(self, layer) -> RaggedState:
        super().start(layer)
        return RaggedState(self)

    def suits(self, keep, place) -> None:
        super().suits(keep, place)
        if place.on_host:
            raise ValueError("ragged: heads of different lengths are held on the device, not on a host")


class RaggedState(GrowingState):
    """keys, values: of the tokens since the last eviction; left: the earlier ones that it kept."""

    states = ("left", *GrowingState.states)

    def __init__(self, policy: Ragged):
        super().__init__(policy)
        self.left, self.tight = Left(policy), True

    def settle(self) -> None:
        """No room is made here either: nothing is reserved beyond the tokens held."""

    @property
    def length(self) -> int:
        return self.left.longest + super().length

    @property
    def bytes_per_slot(self) -> int:
        held = (*(self.keys or self.left.keys), *(self.values or self.left.values))
        return sum(part.shape[-1] * part.element_size() for part in held)

    def parts(self) -> tuple[Parts, Parts]:
        """All of K and V in their stored form, padded: `[batch, kv_heads, slots, width]`."""
        keys, values = self.used()
        if self.left.counts is None:
            return keys, values
        index, _ = self.left.index()
        return _padded(self.left.keys, index, keys), _padded(self.left.values, index, values)

    def keep_slots(self, slots: Tensor) -> None:  # by hand: each head gets a length of its own
        keys, values = self.parts()
        there = slots >= 0
        self.left.counts, self.left.longest = there.sum(-1), slots.shape[2]
        self.left.keys, self.left.values = (
            tuple(gather_slots(part, slots)[there] for part in parts) for parts in (keys, values)
        )
        self.keys = self.values = None
        self.filled = 0
        if self.exact is not None:
            self.exact.keep_slots(slots)


class Left(State):
    """The tokens that an eviction kept in one layer: keys, values, tuples of tensors `[tokens of all rows and
    heads, width]`; counts `[batch, kv_heads]`: tokens of each head; longest: the number of slots that every
    head counts."""

    per_row = ("keys", "values", "counts")

    def __init__(self, policy: Ragged):
        super().__init__(policy)
        self.longest = 0

    def _fits(self, x: Tensor, batch: int) -> bool:
        return len(x) == batch if x is self.counts else len(x) == int(self.counts.sum())

    def index(self) -> tuple[Tensor, Tensor]:
        """The indices of every head's tokens, `[batch, kv_heads, longest]`, and which of these are its
        own."""
        ends = self.counts.flatten().cumsum(0).view_as(self.counts)
        at = torch.arange(self.longest, device=ends.device)
        index = (ends - self.counts)[..., None] + at
        return index.clamp(max=len(self.keys[0]) - 1), at < self.counts[..., None]

    def select_rows(self, rows: Tensor) -> None:  # by hand: every row has its own length
        if self.counts is None:
            return
        rows = rows.to(self.counts.device)
        index, there = (x.index_select(0, rows) for x in self.index())
        mine = index[there]
        self.keys, self.values = (
            tuple(part.index_select(0, mine) for part in parts) for parts in (self.keys, self.values)
        )
        self.counts = self.counts.index_select(0, rows)


def _padded(left: Parts, index: Tensor, since: Parts | None) -> Parts:
    """The flat tokens, by `Left.index`, and the later ones, `[batch, kv_heads, slots, width]` each."""
    padded = tuple(part.index_select(0, index.flatten()).unflatten(0, index.shape) for part in left)
    if since is None:
        return padded
    return tuple(torch.cat(pair, dim=2) for pair in zip(padded, since, strict=True))


def buffer_of(store, keep) -> Growing:
    """A store unchanged; for a format, or None, the default buffer."""
    check_kind("store", store, Growing | Exact | None, "a buffer such as Growing() or a format such as Int()")
    if isinstance(store, Growing):
        return store
    return Ragged(store) if keep.ragged and keep.evicts else Growing(store)
