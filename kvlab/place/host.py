"""Host: K and V live in host memory; a fetch policy says what a decode step brings to the device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from ..link.base import Transfer
from ..measure.machines import link_named
from ..store.excerpt import Excerpt, Parts
from .device import Device


class Fetch(Device):
    """What a step fetches. The base class fetches the whole layer.

    A policy overrides `select`; it may keep state (see `Answer`) and learn from `prefill` and `append`.
    """

    guessed: Tensor | None = None  # slots chosen before the layer's turn (see InfiniGen)
    rehearses = False  # True: `speculate` chooses, before the layer's turn
    certain = False  # True: the whole layer will be wanted, so it may be fetched ahead
    page: int | None = None  # bytes, where only whole pages cross the link ...
    fault = 0.0  # ... and seconds that each of them costs besides

    def select(self, layer, query: Tensor, scaling: float) -> Tensor | None:
        """Slots of past tokens to fetch, `[batch, kv_heads, n]` (-1: none), or None for all of them.

        The newest token needs no fetching: it is on the device already.
        """
        return None

    def extend(self, layer, query: Tensor, keys: Tensor) -> None:
        """Called when a pass of several tokens has read all keys `[batch, kv_heads, slots, head_dim]`:
        perhaps more of the prompt."""

    def resident(self, layer) -> bool:
        """Whether the layer's tokens are still on the device from the last step."""
        return False


class Whole(Fetch):
    """Fetch all of K and V of the layer at every step, while the layer before computes.

    The schedule of FlexGen (Sheng et al. 2023, arXiv 2303.06865), as told in document 001.
    """

    certain = True


class Host(Device):
    """Hold K and V on the host and fetch what `fetch` selects.

    link: what carries the bytes. None: on a CUDA model the store's tensors are CPU tensors and are copied
    when they are needed; on a CPU model the host is the accounting's. A `Link`, or what names one (see
    `machines.link_named`): transfers run on the link's own threads, beside the model, in the stored form.
    What is certain to be needed is asked for when the layer before begins to attend, or right behind the
    rehearsed choice of the layer before; new tokens are written back while the step goes on. `stats()`
    counts the tensors as host bytes, and every byte fetched or written back as moved.
    """

    on_host = True

    def __init__(self, fetch: Fetch | None = None, link=None):
        self.fetch = Whole() if fetch is None else fetch
        self.link = link
        self._new: tuple[Parts, Parts] | None = None  # new K and V, encoded, on the device
        self._write: Transfer | None = None  # carries `_new` to the host
        self._ahead: tuple[Transfer, Tensor | None] | None = None  # asked for, not read yet; and which slots
        self._staged: Parts | None = None  # what this step attends to, in the link's buffers

    def attach(self, model) -> None:
        self.link = link_named(self.link, model)
        if self.link is not None and self.fetch.page is not None:
            self.link = self.link.paged(self.fetch.page, self.fetch.fault)

    def bind(self, shape, layer: int, model=None) -> None:
        self.fetch.bind(shape, layer, model)

    # Writing.

    @property
    def arriving(self) -> int:
        return 0 if self._new is None else self._new[0][0].shape[2]

    def write(self, layer, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        if self.link is None:
            layer.store.append(keys.cpu(), values.cpu(), real)
            return
        self.land(layer)
        self._new = layer.store.encode(keys, values, real)

    def _write_back(self, layer, rows: list[int]) -> None:
        keys, values = self._new
        if self.arriving > 1:  # a prompt: the device lets one layer go before the next is written out
            previous, self.link.unlanded = self.link.unlanded, functools.partial(self.land, layer)
            previous()
        size = self._bytes(layer, rows)
        self._write = self.link.write((*keys, *values), layer=layer.index, bytes=size, why="write")

    def land(self, layer) -> None:
        if self._write is not None:
            (write, self._write), count = (self._write, None), len(self._new[0])
            parts = write.wait()
            layer.store.add(parts[:count], parts[count:])
            self._new = None

    def settle(self, layer) -> None:
        self.land(layer)
        if self._ahead is not None:
            (transfer, _), self._ahead = self._ahead, None
            transfer.abandon()

    def drop(self) -> None:
        for transfer in (self._write, self._ahead and self._ahead[0]):
            if transfer is not None:
                transfer.abandon()
        self._write = self._ahead = None
        if self.link is not None:
            self.link.staging.clear()

    # Reading.

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        if self.link is not None:
            self._write_back(layer, layer.rows_held)
            if layer.following is not None:
                layer.following.place.look_ahead(layer.following)
        layer.moved_bytes += self._bytes(layer, layer.rows_held)
        self.fetch.prefill(layer, query, keys)

    def append(self, layer, keys: Tensor) -> None:
        self.fetch.append(layer, keys)

    def speculate(self, layer, query) -> None:
        if self.fetch.rehearses:
            with layer.marked("selection"):
                self.fetch.speculate(layer, query)
        if self.link is not None and self.fetch.guessed is not None:
            self._ask(layer, self.fetch.guessed, "prefetch")
            layer.following.place.look_ahead(layer.following)

    def look_ahead(self, layer) -> None:
        if self.link is not None and layer.lengths and self.fetch.certain and self._ahead is None:
            self._ask(layer, None, "prefetch")

    def read(self, layer, query: Tensor, scaling: float):
        if self.link is not None and layer.following is not None:
            layer.following.place.look_ahead(layer.following)
        newest, slots = query.shape[2], None
        if newest == 1:
            chosen_now = not (self.fetch.certain or self.fetch.rehearses)
            with layer.marked("selection") if chosen_now else nullcontext():
                slots = self.fetch.select(layer, query, scaling)
        if self.fetch.resident(layer):
            if self._new is not None:
                layer.store.add(*self._new)
                self._new = None
            return super().read(layer, query, scaling)
        layer.moved_bytes += self._bytes(layer, [newest] * len(layer.lengths))
        if self.link is not None:
            held, slots = self._receive(layer, slots)
        else:
            past = [rows - newest for rows in layer.rows_held]
            layer.moved_bytes += self._bytes(layer, past if slots is None else slots)
            held = layer.store
        if newest > 1:  # no slots were chosen
            held = Excerpt.of_numbers(*held.read(query.device))
            self.fetch.extend(layer, query, held.keys[0])
        if slots is not None:
            slots = torch.cat([slots, torch.full_like(slots[..., :1], layer.slots - 1)], dim=-1)
            held = layer.store.pick(slots) if self.link is None else held
        return held, slots

    def _ask(self, layer, slots: Tensor | None, why: str) -> None:
        """Let the link fetch past tokens, with room for the newest one."""
        self.land(layer)
        keys, values = layer.store.parts()
        size = self._bytes(
            layer, [held - self.arriving for held in layer.rows_held] if slots is None else slots
        )
        self._ahead = self.link.fetch((*keys, *values), slots, layer=layer.index, bytes=size, why=why), slots

    def _receive(self, layer, slots: Tensor | None):
        """The fetched tokens and the newest ones, on the device; and the slots fetched."""
        if self._ahead is None:
            self._ask(layer, slots, "fetch")
        self._write_back(layer, [self.arriving] * len(layer.lengths))
        (transfer, slots), self._ahead = self._ahead, None
        with layer.marked("stall"):
            self._staged = transfer.wait()
        layer.moved_bytes += transfer.bytes
        new, parts = (*self._new[0], *self._new[1]), self._staged
        if self.arriving == 1:
            for part, last in zip(parts, new, strict=True):
                part[:, :, -1:] = last
        else:
            parts = tuple(torch.cat([p[:, :, :-1], n], dim=2) for p, n in zip(parts, new, strict=True))
        count = len(self._new[0])
        return layer.store.excerpt(parts[:count], parts[count:]), slots

    def finish(self, layer) -> None:
        if self._staged is not None:
            self.link.release(self._staged)
            self._staged = None

    # Bytes, rows and slots.

    def _bytes(self, layer, tokens: list[int] | Tensor) -> int:
        """Bytes of so many tokens of each row in all KV heads, or of the given slots."""
        parts = layer.store.parts() if self._new is None else self._new
        size = sum(part.shape[-1] * part.element_size() for part in (*parts[0], *parts[1]))
        return size * (
            int((tokens >= 0).sum()) if isinstance(tokens, Tensor) else sum(tokens) * layer.kv_heads
        )

    def tensors(self) -> Iterator[Tensor]:
        yield from self.fetch.tensors()
        if self.link is not None and not self.link.staging.pinned:
            yield from self.link.staging.buffers

    def select_rows(self, rows: Tensor) -> None:
        self.fetch.select_rows(rows)

    def keep_slots(self, slots: Tensor) -> None:
        self.fetch.keep_slots(slots)

    def crop(self, length: int) -> None:
        self.fetch.crop(length)
