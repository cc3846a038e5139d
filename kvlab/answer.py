"""What keeps, stores and places have in common: tensors that follow the rows and slots of a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def gather_slots(tensor: Tensor, slots: Tensor) -> Tensor:
    """Pick slots of a `[batch, kv_heads, slots, ...]` tensor, each row and head its own.

    `slots` is `[batch, kv_heads, n]`; an entry of -1 (nothing there) yields the content of slot 0, which
    the caller masks. Returns `[batch, kv_heads, n, ...]`. Whole slots are copied, one run of memory each.
    """
    batch, heads, count = slots.shape
    flat, index = slot_index(tensor.expand(batch, heads, *tensor.shape[2:]), slots)
    return flat.index_select(0, index).unflatten(0, (batch, heads, count))


def slot_index(tensor: Tensor, slots: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """`tensor` `[batch, kv_heads, slots, ...]` as one list of slots `[rows, ...]`, and where in that list
    the wanted `slots` `[batch, kv_heads, n]` are, `[batch * kv_heads * n]`, on `device` (default: the
    tensor's). No copy where strides allow."""
    by_row, by_head, by_slot = tensor.stride()[:3]
    batch, heads = tensor.shape[:2]
    inner = math.prod(tensor.shape[3:])
    if tensor.numel() and by_slot == inner > 0 and by_row % inner == by_head % inner == 0:
        by_row, by_head = by_row // inner, by_head // inner
        rows = (batch - 1) * by_row + (heads - 1) * by_head + tensor.shape[2]
        strides = (by_slot, *tensor.stride()[3:])
        flat = tensor.as_strided((rows, *tensor.shape[3:]), strides, tensor.storage_offset())
    else:
        by_row, by_head = heads * tensor.shape[2], tensor.shape[2]
        flat = tensor.flatten(0, 2)
    row = torch.arange(batch, device=slots.device).view(-1, 1, 1) * by_row
    head = torch.arange(heads, device=slots.device).view(1, -1, 1) * by_head
    return flat, (slots.clamp(min=0) + (row + head)).flatten().to(device or tensor.device)


class Answer:
    """One answer to Keep, Store or Place, with the state of one layer.

    Two conventions make forks, beam search, eviction and byte accounting work for any answer, one of yours
    included: every attribute that is a tensor or a tuple of tensors has the batch as its first dimension,
    and those named in `per_slot` are `[batch, kv_heads, slots, ...]`. A `KVCache` copies the answers it is
    given once per layer.
    """

    per_slot: tuple[str, ...] = ()

    def bind(self, shape, layer: int, model=None) -> None:
        """Called once per layer before use: check parameters against the model (see
        `models.ModelShape`), resolve defaults. Raises ValueError."""

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor this answer holds."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, tuple):
                yield from (item for item in value if isinstance(item, Tensor))
            elif isinstance(value, Answer):
                yield from value.tensors()

    def _map(self, change, names) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                setattr(self, name, change(value))
            elif isinstance(value, tuple) and any(isinstance(item, Tensor) for item in value):
                setattr(self, name, tuple(change(item) for item in value))

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows: row i becomes a copy of the old row `rows[i]`."""
        self._map(lambda tensor: tensor.index_select(0, rows.to(tensor.device)), list(vars(self)))

    def keep_slots(self, slots: Tensor) -> None:
        """Drop every slot that is not in `slots` `[batch, kv_heads, n]` (-1: nothing there)."""
        self._map(lambda tensor: gather_slots(tensor, slots), self.per_slot)

    def crop(self, length: int) -> None:
        """Keep the first `length` slots."""
        self._map(lambda tensor: tensor[:, :, :length], self.per_slot)


def check_fraction_or_count(name: str, value) -> float | int:
    """A budget: a fraction in (0, 1] or a count of tokens >= 2 (1 is the fraction: everything)."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (0 < value <= 1 or (value > 1 and value == int(value))):
        raise ValueError(
            f"{name}={value!r}: expected a fraction of tokens in (0, 1] or a whole number of tokens"
        )
    return float(value) if value <= 1 else int(value)


def resolve_budget(budget: float | int, tokens: int) -> int | None:
    """Tokens that a budget allows out of `tokens`; None for a budget of 1 (no limit)."""
    if budget == 1:
        return None
    if isinstance(budget, int):
        return budget
    return max(1, int(budget * tokens + 1e-6))
