"""Moves: a layer's decode step in fixed buffers, decided on the device alone.

A step writes one token of every row into a slot whose number is on the device, attends, and drops one token
of every head if the keep says so. Nothing here reads a number from the host, so a CUDA graph of it can be
replayed; `done` updates the host's counters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import attend
from ..keep.base import FINITE
from ..late import Late
from ..store.exact import Parts
from .attend import trusted
from .known import GOES_BY, NEWEST, SUM, coded, looked_at, may_go, turned
from .suited import Later

LEAST_ROOM = 256  # slots that are reserved at a time
SPARE = 2  # slots that the two steps before a capture need besides the first


class Move:
    """A layer's step. flag: bool [1] on the device, becomes true where a number cannot be stored; due:
    whether the next step is of the other kind (`Blocks`)."""

    due = False

    def __init__(self, layer, flag: Tensor):
        self.layer, self.store, self.flag = layer, layer.store, Flag(flag)

    def still(self) -> bool:
        """Whether the layer's store is the same, and nothing observes it."""
        return self.layer.store is self.store and not looked_at(self.layer)

    def tell(self) -> None:
        """Copy to the device the counts that only this layer has."""


class Buffered(Move):
    """A step in the buffers of a `GrowingState`, of so many slots."""

    def __init__(self, layer, flag: Tensor, slots: int):
        super().__init__(layer, flag)
        store = self.store
        if store.keys[0].shape[2] < slots:
            store._lengthen(slots)
        self.buffers = store.keys, store.values
        for part in (*store.keys, *store.values):
            part[:, :, store.filled :] = 0  # what is decoded and not seen must be finite
        if store.fixed_keys or store.fixed_values:
            store.beyond = flag.new_zeros(1, dtype=torch.long) + (0 if store.beyond is None else store.beyond)
        self.beyond = store.beyond

    def coded(self, keys: Tensor, values: Tensor) -> tuple[Parts, Parts]:
        """One new token of every row in its stored form; see `GrowingState.encode`."""
        store = self.store
        forms = (store.format, keys, store.fixed_keys), (store.value_format, values, store.fixed_values)
        with self.flag.open():
            return tuple(self._coded(*one) for one in forms)

    def _coded(self, form, x: Tensor, fixed: Parts) -> Parts:
        x, _ = form.admit(x)
        if fixed and (beyond := form.beyond(x, fixed)) is not None:
            self.beyond += beyond.sum()
        parts = form.write(x, None, fixed)
        return parts[: len(parts) - form.fixed_parts]

    def still(self) -> bool:
        """Whether its buffers are the same as well."""
        same = self.store.keys is self.buffers[0] and self.store.beyond is self.beyond
        return same and super().still()


class Appends(Buffered):
    """A step adds a token, in the slot after the others, and drops none; tokens that leave a window are
    dropped with the next eager step, and are hidden until then.

    positions `[batch, 1 or kv_heads, capacity]`: those of all slots to come as well, and allowed, in which
    ones a token is; None where slot j holds token j.
    """

    def __init__(self, layer, slot: Tensor, count: Tensor, flag: Tensor):
        store, table = layer.store, layer.table
        capacity, filled = store.keys[0].shape[2], store.filled
        if store.max_length < 0 and capacity < filled + LEAST_ROOM:
            capacity = filled + max(LEAST_ROOM, filled // 8)
        if capacity <= filled + SPARE:
            raise Later("its buffer is full")
        super().__init__(layer, flag, capacity)
        self.slot, self.count, self.capacity = slot, count, capacity
        self.positions, self.allowed, self.local = None, None, layer.local
        if table.moved is not None or self.local is not None:
            self.positions = self.foreseen()
            table.moved, there = self.positions[..., :filled], self.positions >= 0
            self.allowed = None if bool(there.all()) else there[:, :, None]
        self.places = torch.arange(capacity, device=slot.device)
        self.kernel = trusted(store, layer.shape.heads, layer.shape.head_dim)

    def attend(self, query, keys, values, scaling, softcap=None, sinks=None) -> Tensor:
        """Shapes as in `attention.attend`, one token of every row."""
        if self.kernel and softcap is None and sinks is None:
            return self._by_kernel(query, keys, values, scaling)
        self._write(self.coded(keys, values))
        seen, allowed = (self.places < self.count)[None, None, None], self._allowed()
        allowed = seen if allowed is None else seen & allowed
        held = self.store.packed(*self.buffers).read(query.device)
        allowed = allowed.expand(len(query), -1, -1, -1)
        return attend(query, *held, scaling, allowed, softcap=softcap, sinks=sinks)[0]

    def _by_kernel(self, query, keys, values, scaling) -> Tensor:
        from .gpu import attend
        from .gpu_append import append, appends

        store, form = self.store, coded(self.store.format)
        turn = store.format, store.value_format
        if appends(form):
            new = turned(turn[0], keys), turned(turn[1], values)
            append(*self.buffers, *new, form, self.slot, self.flag.told)
        else:
            self._write(self.coded(keys, values))
        asked = turned(turn[0], query)
        out = attend(asked, *self.buffers, form, scaling, self._allowed(), count=self.count)
        return turned(turn[1], out, back=True)

    def _write(self, coded: tuple[Parts, Parts]) -> None:
        slot = self.slot.long()
        for buffers, parts in zip(self.buffers, coded, strict=True):
            for buffer, new in zip(buffers, parts, strict=True):
                buffer.index_copy_(2, slot, new)

    def _allowed(self) -> Tensor | None:
        """Which slots the newest token sees as far as their positions go, `[batch, 1 or kv_heads, 1,
        slots]`."""
        if self.local is None:
            return self.allowed
        newest = self.positions.index_select(2, self.slot)
        near = (self.positions > newest - self.local)[:, :, None]
        return near if self.allowed is None else near & self.allowed

    def foreseen(self) -> Tensor:
        """Positions of the tokens in the slots in use, and of those that steps will write after them."""
        table, device = self.layer.table, self.slot.device
        first = torch.tensor(table.lengths, dtype=torch.int32, device="cpu").to(device).view(-1, 1, 1)
        ahead = first + torch.arange(self.capacity - table.count, dtype=torch.int32, device=device)
        held = table.positions[:, :1] if table.moved is None else table.moved
        return torch.cat([held, ahead.expand(-1, held.shape[1], -1)], 2)

    def still(self) -> bool:
        """Whether its slots are for the same tokens as well: padding may have come, or gone."""
        if not super().still():
            return False
        moved, mine = self.layer.table.moved, self.positions
        if mine is None or moved is None:
            return moved is mine
        return moved.data_ptr() == mine.data_ptr() or mine.equal(self.foreseen())

    def ready(self) -> bool:
        """Whether the next step can be done this way."""
        held_back = self.layer.in_prompt if self.local is not None else not self.layer.settled
        return self.still() and not held_back and self.store.filled < self.capacity

    def done(self) -> None:
        """The step has been made: the host counts it."""
        layer, table = self.layer, self.layer.table
        table.moved = None  # else the host would work out the new token's position
        layer.taken(layer.scaling)
        self.store.filled += 1
        if self.positions is not None:
            table.moved = self.positions[..., : table.count]

    def state(self) -> list[Tensor]:
        """The tensors that two steps have changed, except the slots after those in use."""
        return [] if self.beyond is None else [self.beyond]


class Replaces(Buffered):
    """A step writes its token into the slot that the last one left empty, and drops one of every head.

    positions `[batch, kv_heads, slots]`, -1 where there is nothing; hole `[batch, kv_heads, 1]`: the slot
    that was left; newest `[batch]`: the position of the next token; sums: the attention that tokens have
    received, if the keep uses it. Slots are in any order: `leave` puts them in that of their positions, and
    the layer then needs another graph.
    """

    def __init__(self, layer, flag: Tensor):
        self.slots, self.how = layer.slots + 1, GOES_BY[type(layer.keep.policy)]
        super().__init__(layer, flag, self.slots)
        table, device = layer.table, flag.device
        self.positions = pad(table.positions, (0, 1), value=-1)
        self.hole = torch.full_like(self.positions[..., :1], self.slots - 1, dtype=torch.long)
        self.first, may = may_go(layer)
        reach = [newest - one for newest, one in zip(layer.lengths, may, strict=True)]
        self.newest, self.reach = torch.tensor([layer.lengths, reach], dtype=torch.int32, device=device)
        self.sums = None
        if self.how == SUM:
            self.sums = layer.keep.received = pad(layer.keep.received.float(), (0, 1))
        self.asked = torch.ones(len(layer.lengths), 1, dtype=torch.bool, device=device)
        self.even = min(layer.rows_held) == layer.slots  # no slot is empty but the one
        self.used = tuple(tuple(part[:, :, : self.slots] for part in parts) for parts in self.buffers)
        table.moved, table.count = self.positions, self.slots
        self.store.filled = self.slots
        layer.unordered = self.leave

    def leave(self) -> None:
        """Give the layer back, in the order of positions."""
        layer = self.layer
        layer.unordered = None
        empty = self.positions < 0
        order = self.positions.masked_fill(empty, torch.iinfo(torch.int32).max).argsort(-1)
        layer.let_go(order.masked_fill(empty.gather(2, order), -1)[..., :-1], layer.keep.longest)

    def attend(self, query, keys, values, scaling, softcap=None, sinks=None) -> Tensor:
        """See `Appends.attend`."""
        for buffers, parts in zip(self.used, self.coded(keys, values), strict=True):
            for buffer, new in zip(buffers, parts, strict=True):
                buffer.scatter_(2, self.hole[..., None].expand(-1, -1, 1, new.shape[3]), new)
        newest = self.newest.view(-1, 1, 1)
        self.positions.scatter_(2, self.hole, newest.expand_as(self.hole))
        held = self.store.packed(*self.used).read(query.device)
        asked = self.asked if self.how in (SUM, NEWEST) else None
        allowed = None if self.even else (self.positions >= 0)[:, :, None]
        out, received = attend(query, *held, scaling, allowed, asked, softcap=softcap, sinks=sinks)
        self._let_go(received, newest)
        return out

    def _let_go(self, received: Tensor | None, newest: Tensor) -> None:
        """Drop the token with the lowest score, in a tie the newest (`Keep._best`)."""
        if self.how == SUM:
            score = self.sums.add_(received)
        elif self.how == NEWEST:
            score = received.mean(1, keepdim=True).expand_as(received)
        else:
            score = self.positions.float()
        may = (self.positions >= self.first) & (self.positions <= newest - self.reach.view(-1, 1, 1))
        score = score.clamp(*FINITE).masked_fill(~may, FINITE[1])
        score = score.masked_fill(self.positions == newest, torch.inf)
        least = score.amin(-1, keepdim=True)
        gone = self.positions.masked_fill(score > least, -1).argmax(-1, keepdim=True)
        self.positions.scatter_(2, gone, -1)
        if self.sums is not None:
            self.sums.scatter_(2, gone, 0.0)
        self.hole.copy_(gone)
        self.newest.add_(1)

    def ready(self) -> bool:
        """See `Appends.ready`."""
        return self.still() and not self.layer.settled and self.layer.table.moved is self.positions

    def done(self) -> None:
        """See `Appends.done`."""
        self.layer.taken(self.layer.scaling, self.positions)

    def state(self) -> list[Tensor]:
        """See `Appends.state`."""
        also = [x for x in (self.sums, self.beyond) if x is not None]
        return [self.positions, self.hole, self.newest, *self.used[0], *self.used[1], *also]


class Flag(Late):
    """Collects all checks made meanwhile into one result on the device: told, bool [1]."""

    def __init__(self, told: Tensor):
        super().__init__()
        self.told = told

    def takes(self, bad: Tensor) -> bool:
        return True

    def ask(self, bad: Tensor, refuse: Callable[[], None]) -> None:
        self.told.logical_or_(bad.any())
