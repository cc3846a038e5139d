"""Pages: weights in one block of large pages of memory, in the order in which a decode step reads them.

A step on one token reads every weight once, so it waits for memory. A processor reads ahead within a page;
with pages of 4 KiB, each found through tables of its own, a matrix of 688 × 256 was read at 12 GB/s, in one
block of 2 MiB pages at 19 (one thread of a shared Intel Xeon). Linux gives such pages on request; elsewhere
weights stay where they are.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch
from torch import nn

LARGE = 2**21  # bytes of a large page
LINE = 64  # bytes: every weight begins a line of the processor's caches


@torch.no_grad()
def gather(parameters: Iterable[nn.Parameter]) -> bool:
    """Move the numbers of these parameters into one block, in this order; each parameter's data is then a
    view of it, and the old memory is freed. False, with nothing changed, without such pages, for too few
    numbers to fill one, or for memory shared with other processes, or with one another."""
    found = list({id(one): one for one in parameters}.values())
    starts, end = [], 0
    for one in found:
        starts.append(end)
        end += -(-one.nbytes // LINE) * LINE
    storages = {one.untyped_storage().data_ptr() for one in found}
    if end < LARGE or any(one.is_shared() for one in found) or len(storages) < len(found):
        return False
    if (block := _block(end)) is None:
        return False
    for one, start in zip(found, starts, strict=True):
        moved = torch.frombuffer(block, dtype=one.dtype, count=one.numel(), offset=start).view(one.shape)
        one.data = moved.copy_(one)
    return True


def _block(size: int) -> mmap.mmap | None:
    """Memory of this process, in large pages if the system has them; None if it knows none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    block = mmap.mmap(-1, -(-size // LARGE) * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        block.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them
        return None
    return block
