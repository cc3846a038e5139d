"""Synchronous: a host without a link, whose tokens are copied when a step needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from ..models import report_block_inputs
from ..parameters import check_number
from ..policy import View
from ..store.growing import Packed
from .device import DeviceState


class HostState(DeviceState):
    """A host without a link: a step's tokens are copied when it needs them or, on a CPU, only counted.

    fetch: the state of the fetch policy. fetched_bytes: of the last pass (see `Stats`). The store's
    tensors are CPU tensors.
    """

    states = ("fetch",)

    def __init__(self, policy, layer):
        super().__init__(policy)
        self.fetch = policy.fetch.start(layer)
        if getattr(self.fetch, "policy", None) is not policy.fetch:
            kind = type(policy.fetch).__name__
            raise ValueError(f"{kind}.start: expected the fetch's own state, Fetch.start(layer)")
        if not policy.fetch.ours:  # it may look at new keys only when it chooses
            self.fetch.lags = True
        if policy.fetch.speculates and not policy.fetch.whole(layer.index):
            report_block_inputs(layer.model)

    def view(self, layer) -> View:
        """The layer as the fetch policy sees it."""
        return View(layer, self.fetch)

    def write(self, layer, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        layer.store.append(keys.cpu(), values.cpu(), real)

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        layer.moved_bytes += self.bytes_of(layer, layer.rows_held)
        self.policy.fetch.prefill(self.view(layer), query, keys)
        self.look_at_fetch(layer)

    def end_prefill(self, layer) -> None:
        self.policy.fetch.end_prefill(self.view(layer))
        self.look_at_fetch(layer)

    def append(self, layer, keys: Tensor) -> None:
        self.policy.fetch.append(self.view(layer), keys)
        self.look_at_fetch(layer)

    def look_at_fetch(self, layer) -> None:
        """ValueError if what a fetch of one's own remembers does not fit the layer."""
        fetch = self.policy.fetch
        shape = len(layer.lengths), layer.kv_heads, layer.slots
        if not fetch.ours and (odd := self.fetch.odd(*shape, numbers=False)):
            raise ValueError(
                f"{type(fetch).__name__}, layer {layer.index}: {odd}; [batch, kv_heads, slots] is {shape}"
            )

    def speculate(self, layer, query) -> None:
        self.speculated(layer, query)

    def speculated(self, layer, query) -> Tensor | None:
        """The slots that the fetch policy chooses before the layer's turn, if it does."""
        fetch = self.policy.fetch
        if not fetch.speculates or fetch.whole(layer.index):
            return None
        with layer.timed("selection"):
            return _checked(layer, fetch, fetch.speculate(self.view(layer), query), layer.slots)

    @staticmethod
    def reads_all(layer, query: Tensor) -> bool:
        """Whether a pass is no decode step: nothing is chosen for it, and the fetch policy may learn from
        it."""
        return query.shape[2] > 1 or layer.in_prompt

    def resident_bytes(self, layer) -> int:
        share = self.policy.fetch.resident(self.view(layer)) if layer.lengths else 0
        check_number("resident", share, lambda x: 0 <= x <= 1, "the share of K and V on the device, 0 to 1")
        held = self.bytes_of(layer, [layer.store.length] * len(layer.lengths)) if share else 0
        return round(share * held)

    def select(self, layer, query: Tensor) -> Tensor | None:
        """The slots that the fetch policy chooses for a decode step; None: all."""
        if self.reads_all(layer, query):
            return None
        fetch = self.policy.fetch
        chosen_now = not fetch.whole(layer.index) and not fetch.speculates
        with layer.timed("selection") if chosen_now else nullcontext():
            return _checked(layer, fetch, fetch.select(self.view(layer), query), layer.slots - 1)

    learns = property(lambda self: self.policy.fetch.learns)
    chooses = property(lambda self: self.policy.fetch.chooses)

    @property
    def index(self) -> Iterator[Tensor]:
        """The tensors that the fetch policy chooses by."""
        return self.fetch.tensors()

    def read(self, layer, query: Tensor):
        slots, fetch = self.select(layer, query), self.policy.fetch
        self.fetched_bytes = 0
        if (layer.later or not layer.in_prompt) and fetch.on_device(self.view(layer)):
            return self.all_here(layer, query.device), None
        layer.moved_bytes += self.bytes_of(layer, layer.table.fed)  # written back
        held, slots = self.receive(layer, slots)
        layer.moved_bytes += self.fetched_bytes
        if not self.reads_all(layer, query):
            return held, slots
        held = Packed.of_numbers(*held.read(query.device))
        fetch.extend(self.view(layer), query, held.keys[0])  # it may learn from them
        self.look_at_fetch(layer)
        return held, None

    def all_here(self, layer, device: torch.device):
        """The store, if no transfer is needed."""
        return layer.store

    def receive(self, layer, slots: Tensor | None):
        """The tokens that the pass attends to, past ones in these slots (None: all) and the newest; and the
        slots of both. Sets `fetched_bytes`."""
        past = [held - new for held, new in zip(layer.rows_held, layer.table.fed, strict=True)]
        self.fetched_bytes = self.bytes_of(layer, past if slots is None else slots)
        slots = self.with_newest(layer, slots)
        return (layer.store if slots is None else layer.store.pick(slots)), slots

    @staticmethod
    def with_newest(layer, slots: Tensor | None) -> Tensor | None:
        """The chosen slots and the newest one."""
        if slots is None:
            return None
        return torch.cat([slots, slots.new_full((*slots.shape[:2], 1), layer.slots - 1)], dim=-1)

    def bytes_of(self, layer, tokens: list[int] | Tensor) -> int:
        """Bytes of some tokens of each row in all KV heads, or of the given slots."""
        if not isinstance(tokens, Tensor):
            return sum(tokens) * layer.kv_heads * self.slot_bytes(layer)
        count = getattr(tokens, "there", None)  # see `most_important`
        count = int((tokens >= 0).sum()) if count is None else count
        self.complete = count == tokens.numel()
        return count * self.slot_bytes(layer)

    def slot_bytes(self, layer) -> int:
        """Bytes of one token's K and V in one head."""
        return layer.store.bytes_per_slot


def _checked(layer, fetch, slots, past: int) -> Tensor | None:
    """What a fetch policy chose, if it is valid: each of the `past` slots at most once. Another slot would be
    one of another row or head."""
    if slots is None or fetch.ours:
        return slots
    shape = len(layer.lengths), layer.kv_heads
    fits = isinstance(slots, Tensor) and slots.dtype == torch.int64 and slots.layout == torch.strided
    if fits and not slots.is_meta and slots.dim() == 3 and slots.shape[:2] == shape:
        ordered = slots.sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
        if not bool(twice.any() | (ordered < -1).any() | (ordered >= past).any()):
            return slots.clone()  # without `there`, which may be of other slots (see `most_important`)
    raise ValueError(
        f"{type(fetch).__name__}, layer {layer.index}: expected slots to fetch, int64 [batch, kv_heads, n], "
        f"{shape} first, each below {past} at most once, or -1"
    )
