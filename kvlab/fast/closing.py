"""Closing up: which token goes, and how the slots that stay move together, compiled by numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from .known import PLACE, SUM

FIXED = np.int32(0x7F7FFFFF)  # the key of the largest fp32: what a rule holds, which goes if nothing else can
TOGETHER = 16  # keys
NOTHING = np.int32(0x7FFFFFFF)  # the key of a slot that is empty, or holds the newest token


@njit(fastmath=False)
def _key(x):
    """An integer that orders fp32 numbers as they are ordered: two zeros are equal, NaN comes first."""
    bits = np.float32(x + np.float32(0.0)).view(np.int32)
    key = bits if bits >= 0 else np.int32(bits ^ np.int32(0x7FFFFFFF))
    return key if x == x else np.int32(-(2**31))


@njit
def _last_of_least(keys):
    """Where the smallest key is, the last one if it is there more than once; the end if all are `NOTHING`."""
    least = NOTHING
    for i in range(keys.shape[0]):
        least = min(least, keys[i])
    at = keys.shape[0] - 1
    while at >= TOGETHER:  # so many at a time, in one register
        there = False
        for i in range(at - TOGETHER + 1, at + 1):
            there |= keys[i] == least
        if there:
            break
        at -= TOGETHER
    while keys[at] != least:
        at -= 1
    return at


@njit(nogil=True, cache=True)
def lowest(score, positions, gone):
    """The slot of every head with the lowest score `[batch, kv_heads, slots]` -> gone `[batch, kv_heads]`: of
    those whose position is not -1, nor the largest; the last of them if it is a tie, or if it is NaN."""
    batch, heads, slots = score.shape
    keys = np.empty(slots, np.int32)
    for b in range(batch):
        for h in range(heads):
            newest = np.int32(-1)
            for i in range(slots):
                newest = max(newest, positions[b, h, i])
            for i in range(slots):
                place = positions[b, h, i]
                keys[i] = _key(score[b, h, i]) if -1 < place < newest else NOTHING
            gone[b, h] = _last_of_least(keys)


@njit
def leave(how, received, keys, first, last, newest, positions, sums, left, left_sums):
    """One head's part in a step after which one token goes, `lowest` of what `how` says.

    positions, sums `[slots - 1]`: before the step, whose token has position `newest`; received `[slots]`:
    what this step's query gave to each slot (spoilt); first, last: positions of those that no rule holds. In
    left and left_sums `[slots]` is what comes of positions and sums. keys `[slots]`: room. Every loop does
    one thing: numba does not copy slices, nor LLVM loops over many arrays, in registers of many numbers.
    """
    slots = keys.shape[0]
    if how == SUM:
        for i in range(slots - 1):
            received[i] += sums[i]
        for i in range(slots):
            left_sums[i] = received[i]
    for i in range(slots - 1):
        place = positions[i]
        key = place if how == PLACE else _key(received[i])
        key = key if first <= place <= last else FIXED
        keys[i] = key if place >= 0 else NOTHING
    keys[slots - 1] = NOTHING
    for i in range(slots - 1):
        left[i] = positions[i]
    left[slots - 1] = newest
    left[_last_of_least(keys)] = -1


@njit
def draw_up(left, left_sums, positions, sums, k, k_scales, v, v_scales):
    """What one head holds closes up: left and left_sums `[slots]` into positions and sums, which are as long
    as the tokens that are left, and K, V and their scales `[capacity, width]` within their buffers."""
    to = 0
    for at in range(left.shape[0]):
        if left[at] < 0:
            continue
        positions[to] = left[at]
        if sums.shape[0]:
            sums[to] = left_sums[at]
        if to < at:
            _move(k, at, to)
            _move(k_scales, at, to)
            _move(v, at, to)
            _move(v_scales, at, to)
        to += 1


@njit
def _move(part, at, to):
    for j in range(part.shape[1]):
        part[to, j] = part[at, j]
