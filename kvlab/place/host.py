"""Host: K and V live in host memory; a fetch policy says what a decode step brings to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .device import Device


class Fetch(Device):
    """What a step fetches. The base class fetches the whole layer.

    A policy overrides `select`; it may keep state (see `Answer`) and learn from `prefill` and `append`.
    """

    def select(self, layer, query: Tensor, scaling: float) -> Tensor | None:
        """Slots of past tokens to fetch, `[batch, kv_heads, n]` (-1: none), or None for all of them.

        The newest token needs no fetching: it is on the device already.
        """
        return None


class Whole(Fetch):
    """Fetch all of K and V of the layer at every step."""


class Host(Device):
    """Hold K and V on the host and fetch what `fetch` selects.

    On a CUDA model the store's tensors are CPU tensors and really cross the link; on a CPU model the host
    is the accounting's: `stats()` counts them as host bytes, and every fetched or written-back byte as moved.
    """

    on_host = True

    def __init__(self, fetch: Fetch | None = None):
        self.fetch = Whole() if fetch is None else fetch

    def bind(self, anatomy, layer: int) -> None:
        self.fetch.bind(anatomy, layer)

    def foresee(self, layer, query) -> None:
        self.fetch.foresee(layer, query)

    def home(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        layer.moved_bytes += self._bytes(layer, layer.rows_held)
        self.fetch.prefill(layer, query, keys)

    def append(self, layer, keys: Tensor) -> None:
        layer.moved_bytes += self._bytes(layer, [keys.shape[2]] * len(layer.lengths))
        self.fetch.append(layer, keys)

    def read(self, layer, query: Tensor, scaling: float):
        slots = self.fetch.select(layer, query, scaling) if query.shape[2] == 1 else None
        if slots is None:
            past = [held - query.shape[2] for held in layer.rows_held]
            layer.moved_bytes += self._bytes(layer, past)
            return super().read(layer, query, scaling)
        row_bytes = layer.store.bytes_per_slot
        layer.moved_bytes += int((slots >= 0).sum()) * row_bytes
        newest = torch.full_like(slots[..., :1], layer.store.length - 1)
        slots = torch.cat([slots, newest], dim=-1)
        return (*layer.store.read_slots(slots, query.device), slots)

    def select_rows(self, rows: Tensor) -> None:
        self.fetch.select_rows(rows)

    def keep_slots(self, slots: Tensor) -> None:
        self.fetch.keep_slots(slots)

    def crop(self, length: int) -> None:
        self.fetch.crop(length)

    @staticmethod
    def _bytes(layer, tokens: list[int]) -> int:
        """Bytes of so many tokens of each row, all KV heads."""
        return sum(tokens) * layer.kv_heads * layer.store.bytes_per_slot
