"""Closing up: which token goes, and how the slots that stay move together, compiled by numba."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor


@njit(nogil=True, cache=True)
def lowest(score, positions, gone):
    """The slot of every head with the lowest score `[batch, kv_heads, slots]` -> gone `[batch, kv_heads]`: of
    those whose position is not -1, nor the largest; the last of them if it is a tie, or if it is NaN."""
    batch, heads, slots = score.shape
    for b in range(batch):
        for h in range(heads):
            newest = np.int32(-1)
            for i in range(slots):
                newest = max(newest, positions[b, h, i])
            least, at = np.float32(np.inf), slots - 1
            for i in range(slots):
                x = score[b, h, i]
                if -1 < positions[b, h, i] < newest and not x > least:
                    least, at = (x if x == x else np.float32(-np.inf)), i
            gone[b, h] = at


@njit(nogil=True, cache=True)
def in_order(slots):
    """Whether slots int64 `[batch, kv_heads, n]` (-1: nothing) can be moved one after another, the first one
    first, without one that is still to be moved being overwritten: in ascending order they can."""
    for b in range(slots.shape[0]):
        for h in range(slots.shape[1]):
            for i in range(slots.shape[2]):
                if -1 < slots[b, h, i] < i:
                    return False
    return True


@njit(nogil=True, cache=True)
def close_up(x, slots):
    """What lies in `slots` `[batch, kv_heads, n]`, which are `in_order`, moves into the first n slots of x
    `[batch, kv_heads, capacity, bytes]`; where a slot is -1, what lay there stays."""
    for b in range(slots.shape[0]):
        for h in range(slots.shape[1]):
            for i in range(slots.shape[2]):
                at = slots[b, h, i]
                if at > i:
                    for j in range(x.shape[3]):
                        x[b, h, i, j] = x[b, h, at, j]


def bytes_of(x: Tensor) -> np.ndarray:
    """The bytes of a tensor `[batch, kv_heads, capacity, width]`, as wide words as its slots allow."""
    width = x.shape[3] * x.element_size()
    return x.view(torch.int64 if width % 8 == 0 else torch.uint8).numpy()
