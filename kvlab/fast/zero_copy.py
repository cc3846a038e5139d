"""Gather rows of pinned host memory from the device, in Triton: they cross the link and nothing else does.

Triton comes with torch's CUDA builds. With TRITON_INTERPRET=1 the same kernel runs on CPU tensors, slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gather import slot_index

ROWS = 16  # rows that a program copies


@triton.jit
def _copy_rows(source, index, target, count, WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr):
    """target[row] = source[index[row]] for rows of `WIDTH` words."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    there = (row < count)[:, None] & (lane < WIDTH)[None, :]
    wanted = tl.load(index + row, mask=row < count, other=0)
    words = tl.load(source + wanted[:, None] * WIDTH + lane[None, :], mask=there)
    tl.store(target + row[:, None].to(tl.int64) * WIDTH + lane[None, :], words, mask=there)


def gather(parts: tuple[Tensor, ...], slots: Tensor | None, device: torch.device) -> tuple[Tensor, ...]:
    """New tensors `[batch, kv_heads, n + 1, width]` on `device` with the given slots `[batch, kv_heads, n]`
    (None: all) of every part `[batch, kv_heads, tokens, width]`. The content of the last slot is undefined.

    parts are in pinned memory, which the device can read; slots on `device`.
    """
    batch, heads, tokens = parts[0].shape[:3]
    if slots is None:
        slots = torch.arange(tokens, device=device).expand(batch, heads, -1)
    slots = torch.nn.functional.pad(slots, (0, 1))
    found = []
    for part in parts:
        flat, index = slot_index(part, slots, device)
        target = torch.empty(*slots.shape, part.shape[3], dtype=part.dtype, device=device)
        word = torch.int32 if part.shape[3] * part.element_size() % 4 == 0 else torch.uint8
        source, words = flat.view(word), target.view(word)
        width, count = words.shape[3], len(index)
        _copy_rows[triton.cdiv(count, ROWS),](
            source, index, words, count, WIDTH=width, LANES=triton.next_power_of_2(width), ROWS=ROWS
        )
        found.append(target)
    return tuple(found)
