"""Staging: the device-side buffers that fetched rows arrive in, used again and again."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

ALIGN = 64  # bytes


class Staging:
    """Hands out buffers and takes them back; grows to what is in use at one time, with a quarter to spare.

    Without it every transfer would be written into fresh memory, and the operating system would map it page
    by page on the way. pinned: memory that a GPU can copy from directly.
    """

    def __init__(self, pinned: bool = False):
        self.pinned = pinned
        self.buffers: tuple[Tensor, ...] = ()  # all of them, uint8
        self._used: set[int] = set()
        self._lock = threading.Lock()

    def take(self, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
        """Tensors of these shapes in an unused buffer; their content is undefined."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        room = [-(-size // ALIGN) * ALIGN for size in sizes]
        pieces = self._take(sum(room))[: sum(room)].split(room)
        return tuple(
            piece[:size].view(dtype).view(shape)
            for piece, size, dtype, shape in zip(pieces, sizes, dtypes, shapes, strict=True)
        )

    def give_back(self, parts: tuple[Tensor, ...]) -> None:
        """The buffer that holds these tensors is free again."""
        with self._lock:
            self._used.discard(parts[0].untyped_storage().data_ptr())

    def clear(self) -> None:
        """Drop all buffers; those in use live until their last use."""
        with self._lock:
            self.buffers, self._used = (), set()

    def _take(self, size: int) -> Tensor:
        with self._lock:
            free = [buffer for buffer in self.buffers if buffer.data_ptr() not in self._used]
            fitting = [buffer for buffer in free if buffer.numel() >= size]
            if fitting:
                found = min(fitting, key=Tensor.numel)
            else:  # replace the smallest free buffer, if there is one, by one that fits
                room, kind = max(size + size // 4, ALIGN), torch.uint8
                found = torch.empty(room, dtype=kind, pin_memory=self.pinned, device="cpu")
                smallest = min(free, key=Tensor.numel).data_ptr() if free else None
                kept = [buffer for buffer in self.buffers if buffer.data_ptr() != smallest]
                self.buffers = (*kept, found)
            self._used.add(found.data_ptr())
            return found
