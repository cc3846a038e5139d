"""Gather: pick slots of a tensor, separately for each row and head."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def with_room(x: Tensor, slots: int, pinned: bool = False) -> Tensor:
    """A copy of x `[batch, kv_heads, n, ...]` at the start of a larger buffer, in pinned host memory or not.
    Pinned memory holds token after token, so that everything crosses a link in one copy."""
    batch, heads, count, *rest = x.shape
    if pinned:
        buffer = by_head(x.new_empty((slots, batch, heads, *rest), pin_memory=True))
    else:
        buffer = x.new_empty((batch, heads, slots, *rest))
    buffer[:, :, :count] = x
    return buffer


def by_token(x: Tensor) -> Tensor:
    """`[batch, kv_heads, slots, width]` as `[slots, batch, kv_heads, width]`; the same memory."""
    return x.permute(2, 0, 1, 3)


def by_head(x: Tensor) -> Tensor:
    """The inverse of `by_token`."""
    return x.permute(1, 2, 0, 3)


def begun(x: Tensor) -> Tensor:
    """The whole buffer `[batch, kv_heads, more slots, width]` that starts with x, token after token."""
    slots = x.untyped_storage().nbytes() // x[:, :, :1].nbytes
    return x.as_strided((*x.shape[:2], slots, x.shape[3]), x.stride(), 0)


def gather_slots(tensor: Tensor, slots: Tensor) -> Tensor:
    """Pick slots of a `[batch, kv_heads, slots, ...]` tensor, separately for each row and head.

    `slots` is `[batch, kv_heads, n]`; an entry of -1 (nothing there) yields the content of slot 0, which
    the caller masks. Returns `[batch, kv_heads, n, ...]`. Whole slots are copied, one run of memory each.
    """
    batch, heads, count = slots.shape
    if tensor.dim() == 3:
        return tensor.expand(batch, heads, -1).gather(2, slots.clamp(min=0))
    flat, index = slot_index(tensor.expand(batch, heads, *tensor.shape[2:]), slots)
    return flat.index_select(0, index).unflatten(0, (batch, heads, count))


def in_order(stays: Tensor) -> Tensor:
    """The slots that stay, bool `[batch, kv_heads, slots]`, in the form of `gather_slots`: `[batch, kv_heads,
    n]` in order, -1 at the end of a head with fewer."""
    slots, most = stays.shape[2], int(stays.sum(-1).amax())
    chosen = torch.where(stays, torch.arange(slots, device=stays.device), slots)
    chosen = chosen.sort(dim=-1).values[..., :most]
    return chosen.masked_fill(chosen == slots, -1)


def among(slots: Tensor, count: int) -> Tensor:
    """Which of `count` slots are among `slots` `[batch, kv_heads, n]` (-1: none), bool `[batch, kv_heads,
    count]`."""
    found = torch.zeros(*slots.shape[:2], count + 1, dtype=torch.bool, device=slots.device)
    return found.scatter_(2, slots.where(slots >= 0, count), True)[..., :count]


def slot_index(tensor: Tensor, slots: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """`tensor` `[batch, kv_heads, slots, ...]` as one list of slots `[rows, ...]`, and where in that list
    the wanted `slots` `[batch, kv_heads, n]` are, `[batch * kv_heads * n]`, on `device` (default: the
    tensor's). No copy where strides allow."""
    batch, heads, count = tensor.shape[:3]
    inner, within = math.prod(tensor.shape[3:]), tensor[0, 0, :1]
    steps = heads * count, count, 1  # slots from a row, a head and a slot to the next
    if tensor.numel() and within.is_contiguous() and not any(step % inner for step in tensor.stride()[:3]):
        steps = tuple(step // inner for step in tensor.stride()[:3])
        rows = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=False))
        strides = (inner, *tensor.stride()[3:])
        flat = tensor.as_strided((rows, *tensor.shape[3:]), strides, tensor.storage_offset())
    else:
        flat = tensor.flatten(0, 2)
    row = torch.arange(batch, device=slots.device).view(-1, 1, 1) * steps[0]
    head = torch.arange(heads, device=slots.device).view(1, -1, 1) * steps[1]
    at = slots.clamp(min=0) if steps[2] == 1 else slots.clamp(min=0) * steps[2]
    return flat, (at + (row + head)).flatten().to(device or tensor.device)
