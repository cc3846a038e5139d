"""Gather: slots of a tensor picked, each row and head its own."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_room(x: Tensor, slots: int, pinned: bool = False) -> Tensor:
    """A copy of x `[batch, kv_heads, n, ...]` that begins a buffer of so many slots, in pinned host memory or
    not."""
    buffer = x.new_empty((*x.shape[:2], slots, *x.shape[3:]), pin_memory=pinned)
    buffer[:, :, : x.shape[2]] = x
    return buffer


def gather_slots(tensor: Tensor, slots: Tensor) -> Tensor:
    """Pick slots of a `[batch, kv_heads, slots, ...]` tensor, each row and head its own.

    `slots` is `[batch, kv_heads, n]`; an entry of -1 (nothing there) yields the content of slot 0, which
    the caller masks. Returns `[batch, kv_heads, n, ...]`. Whole slots are copied, one run of memory each.
    """
    batch, heads, count = slots.shape
    if tensor.dim() == 3:
        return tensor.expand(batch, heads, -1).gather(2, slots.clamp(min=0))
    flat, index = slot_index(tensor.expand(batch, heads, *tensor.shape[2:]), slots)
    return flat.index_select(0, index).unflatten(0, (batch, heads, count))


def in_order(stays: Tensor) -> Tensor:
    """The slots that stay, bool `[batch, kv_heads, slots]`, as `gather_slots` takes them: `[batch, kv_heads,
    n]` in order, -1 at the end of a head where fewer stay."""
    slots, most = stays.shape[2], int(stays.sum(-1).amax())
    chosen = torch.where(stays, torch.arange(slots, device=stays.device), slots)
    chosen = chosen.sort(dim=-1).values[..., :most]
    return chosen.masked_fill(chosen == slots, -1)


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
