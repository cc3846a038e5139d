"""Blocks: the decode step of a layer that KIVI holds, in fixed buffers; see `moves.py`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import attend
from ..store.growing import joined
from ..store.planes import pack, unpack
from .attend import trusted
from .moves import LEAST_ROOM, Move
from .suited import Later, Unsuited


class Blocks(Move):
    """A step adds a token to the window; every `group` steps, where it is `due`, the oldest tokens are
    written as a block before it attends.

    counts: int32 [2] on the device, tokens that are written and recent ones.
    keys, values, blocks: buffers, of which the store sees the written part.
    """

    def __init__(self, layer, flag: Tensor):
        super().__init__(layer, flag)
        store = self.store
        if layer.table.moved is not None:
            raise Unsuited("its blocks hold padding")
        if not store.written:
            raise Later("no block of it is written yet")
        self.group = group = store.group
        room = max(LEAST_ROOM, store.written // 8) // group * group + 2 * group
        self.capacity = store.written + room
        self.short = (store.recent - store.prompt) % group  # tokens that the first block lacks
        self.keys, self.values = (longer(parts, room) for parts in (store.keys, store.values))
        self.blocks = longer(store.blocks, room // group)
        store.recents = self.recents = longer(store.window, store.recent + group + 2 - store.filled)
        self.counts = torch.empty(2, dtype=torch.int32, device=flag.device)
        self.places = torch.arange(self.capacity, device=flag.device)
        self._show(store.written, store.filled)
        self.kernel = trusted(store, layer.shape.heads, layer.shape.head_dim)

    def _show(self, written: int, filled: int) -> None:
        """Set the numbers of tokens in use, of the buffers and of the window."""
        store, blocks = self.store, (written + self.short) // self.store.group
        for name, slots in (("keys", written), ("values", written), ("blocks", blocks)):
            setattr(store, name, tuple(part[:, :, :slots] for part in getattr(self, name)))
        store.filled, self.seen = filled, store.keys
        self.look()

    def look(self) -> None:
        """Whether the next step writes a block."""
        self.due = self.store.due(self.store.length + 1) > 0

    def tell(self) -> None:
        held = self.store.written, self.store.filled
        self.counts.copy_(torch.tensor(held, dtype=torch.int32, device="cpu"))

    def attend(self, query, keys, values, scaling, softcap=None, sinks=None) -> Tensor:
        """See `Appends.attend`."""
        store, written, recent = self.store, self.counts[:1], self.counts[1:]
        self._append(keys, values, recent)
        recent += 1
        if self.due:
            self._write(written, recent)
        if self.kernel and softcap is None and sinks is None:
            from . import gpu_kivi

            return gpu_kivi.attend(query, self, scaling, counts=self.counts)
        block = (self.places + self.short) // store.group
        scales = [part.index_select(2, block) for part in self.blocks]
        held = (
            store.format.numbers(unpack(self.keys[0], store.format.bits), scales, store.dtype),
            store.value_format.decode(self.values, store.dtype),
        )
        window = torch.arange(self.recents[0].shape[2], device=query.device) < recent
        allowed = torch.cat([self.places < written, window])[None, None, None].expand(len(query), -1, -1, -1)
        held = joined(held, self.recents)
        return attend(query, *held, scaling, allowed, softcap=softcap, sinks=sinks)[0]

    def _append(self, keys: Tensor, values: Tensor, recent: Tensor) -> None:
        """One more token at the end of the window."""
        store = self.store
        with self.flag.open():
            forms = (store.format, keys), (store.value_format, values)
            new = [form.admit(x)[0].to(store.dtype) for form, x in forms]
        for side, x in zip(self.recents, new, strict=True):
            side.index_copy_(2, recent.long(), x)

    def _write(self, written: Tensor, recent: Tensor) -> None:
        """The oldest `group` tokens of the window become a block; see `KiviState._write`."""
        store, form, group = self.store, self.store.format, self.store.group
        keys, values = (side[:, :, :group] for side in self.recents)
        numbers = form.fit(keys.float())
        codes = pack(form.quantize(keys.float(), numbers), form.bits)
        at, block = written.long() + self.places[:group], (written.long() + self.short) // group
        new = store.value_format.write(values.float())
        for part, x in zip((*self.keys, *self.values), (codes, *new), strict=True):
            part.index_copy_(2, at, x)
        for part, x in zip(self.blocks, numbers, strict=True):
            part.index_copy_(2, block, x)
        for side in self.recents:
            side[:, :, :-group] = side[:, :, group:].clone()
        written += group
        recent -= group

    def ready(self) -> bool:
        """See `Appends.ready`."""
        store = self.store
        same = store.keys is self.seen and store.recents is self.recents
        self.look()
        return self.still() and same and self.layer.settled and store.written + store.group <= self.capacity

    def done(self) -> None:
        """See `Appends.done`."""
        store, group = self.store, self.store.group
        self.layer.taken(self.layer.scaling)
        if self.due:
            self._show(store.written + group, store.filled + 1 - group)
        else:
            store.filled += 1

    def state(self) -> list[Tensor]:
        """See `Appends.state`."""
        return [self.counts, *self.recents]


def longer(parts, slots: int) -> tuple[Tensor, ...]:
    """Copies with so many more slots, of zeros."""
    return tuple(pad(part, (0, 0, 0, slots)) for part in parts)
