"""A host behind a link: transfers run beside the model, and tokens that every step needs are prefetched."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..gather import with_room
from .synchronous import HostState


class PipelinedState(HostState):
    """Tokens that a step always needs are prefetched when the previous layer begins to attend, or right after
    its speculative choice; new tokens are written back while the step goes on.

    new: K and V of the newest tokens, encoded, on the device, until they are committed. writing: the transfer
    that carries them to the host. ahead: a transfer requested and not yet read, and its slots (None: all).
    staged: the tokens that this step attends to, in the link's buffers.
    """

    shared = ("new", "ahead", "staged")
    writing, lost = None, False

    @property
    def link(self):
        return self.policy.link

    # Writing.

    @property
    def uncommitted(self) -> int:
        """Tokens that the store does not hold yet."""
        return 0 if self.new is None else self.new[0][0].shape[2]

    def write(self, layer, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        self.commit(layer)
        self.new = layer.store.encode(keys, values, real)

    def _write_back(self, layer, rows: list[int]) -> None:
        keys, values = self.new
        if self.uncommitted > 1:  # a prompt: the device lets one layer go before the next is written out
            before = layer.cache().attending[layer.order - 1]  # before the first one the last
            before.place.commit(before)
        size = self.bytes_of(layer, rows)
        self.writing = self.link.write((*keys, *values), layer=layer.index, bytes=size, why="write")

    def commit(self, layer) -> None:
        if self.lost:
            raise RuntimeError("a write to the host has failed: start again with cache.reset()")
        if self.writing is not None:
            try:
                parts, count = self.writing.wait(), len(self.new[0])
            except RuntimeError:
                self.lost = True
                raise
            self.lost = True  # while it is on its way into the store
            layer.store.add(parts[:count], parts[count:])
            self.new, self.writing, self.lost = None, None, False

    def empties(self, layer) -> int:
        """An eighth while a GPU's tokens are on the host, whose processor would move them."""
        far = self.link.on_gpu and not layer.in_prompt and not layer.store.keys[0].is_cuda
        return layer.slots // 8 if far else 0

    def _lie(self, layer, device: torch.device) -> None:
        """Keep the stored tokens on this device from now on: on a GPU, if unified memory has room for
        them."""
        store = layer.store
        if not self.link.on_gpu or store.keys[0].device == device:
            return
        if device.type == "cpu":
            moved = (tuple(with_room(x, len(x[0, 0]) + 1, True) for x in parts) for parts in store.used())
        else:
            moved = (tuple(x.to(device) for x in parts) for parts in store.used())
        store.keys, store.values = moved

    def flush(self, layer) -> None:
        self.commit(layer)
        if self.ahead is not None:
            (transfer, _), self.ahead = self.ahead, None
            self.link.abandon(transfer)

    def drop(self) -> None:
        for transfer in (self.writing, self.ahead and self.ahead[0]):
            if transfer is not None:
                self.link.abandon(transfer)
        self.writing = self.ahead = None
        self.link.staging.clear()

    # Reading.

    def end_prefill(self, layer) -> None:
        super().end_prefill(layer)
        self.link.staging.clear()  # a piece fetches more than a step does

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        self._write_back(layer, layer.rows_held)
        self._prefetch_next(layer)
        super().prefill(layer, query, keys)

    def speculate(self, layer, query) -> None:
        chosen = self.speculated(layer, query)
        if chosen is not None:
            self._ask(layer, chosen, "prefetch")
            self._prefetch_next(layer)

    def _prefetch_next(self, layer) -> None:
        """Let the next layer request ahead; a model's only layer waits for its keep's eviction."""
        if layer.next_layer is not layer:
            layer.next_layer.place.prefetch(layer.next_layer)

    def prefetch(self, layer) -> None:
        if layer.lengths and self.policy.fetch.whole(layer.index) and self.ahead is None:
            self._ask(layer, None, "prefetch")

    def read(self, layer, query: Tensor):
        self._prefetch_next(layer)
        return super().read(layer, query)

    def all_here(self, layer, device: torch.device):
        self._lie(layer, device)
        if self.new is not None:
            layer.store.add(*self.new)
            self.new = None
        return layer.store

    def _ask(self, layer, slots: Tensor | None, why: str) -> None:
        """Request past tokens from the link, with room for the newest one."""
        self.commit(layer)
        self._lie(layer, torch.device("cpu"))
        keys, values = layer.store.parts()
        past = layer.rows_held
        if self.uncommitted:
            past = [held - new for held, new in zip(past, layer.table.fed, strict=True)]
        size = self.bytes_of(layer, past if slots is None else slots)
        self.ahead = self.link.fetch((*keys, *values), slots, layer=layer.index, bytes=size, why=why), slots

    def receive(self, layer, slots: Tensor | None):
        if self.ahead is None:
            self._ask(layer, slots, "fetch")
        self._write_back(layer, layer.table.fed)
        (transfer, slots), self.ahead = self.ahead, None
        with layer.timed("stall"):
            self.staged = transfer.wait()
        self.fetched_bytes = transfer.bytes
        written, parts = (*self.new[0], *self.new[1]), self.staged
        if self.uncommitted == 1:
            for part, last in zip(parts, written, strict=True):
                part[:, :, -1:] = last
        else:
            parts = tuple(torch.cat([p[:, :, :-1], n], dim=2) for p, n in zip(parts, written, strict=True))
        count = len(self.new[0])
        return layer.store.packed(parts[:count], parts[count:]), self.with_newest(layer, slots)

    def finish(self, layer) -> None:
        if self.staged is not None:
            self.link.release(self.staged)
            self.staged = None

    def slot_bytes(self, layer) -> int:
        if self.new is None:
            return layer.store.bytes_per_slot
        return sum(part.shape[-1] * part.element_size() for part in (*self.new[0], *self.new[1]))

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if not self.link.staging.pinned:
            yield from self.link.staging.buffers
