"""A decode step on a GPU after which one token of every head goes, in Triton: what `moves.Replaces` does.

`_place` writes the new token into the slot that is empty, the kernels of `gpu.py` attend, `_received` says
what every slot was given, from the scores once more and the sums that attending has left, and `_lowest` finds
the token that goes. Definitions: `attention.attend`, `Keep._best`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import LOG2_E, NOTHING
from .known import NEWEST, PLACE, SUM

BLOCK, MANY = 64, 1024  # slots of a program that multiplies, and of one that compares
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit(do_not_specialize=["slots", "kv_heads"])
def _place(
    keys, values, new_keys, new_values, positions, hole, newest, stride, slots, kv_heads,
    D: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of one (row, KV head): K, V and position of the new token go into its empty slot."""
    head, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    there, slot = lane < D, tl.load(hole + head)
    to = head * stride + slot * D + lane
    tl.store(keys + to, tl.load(new_keys + head * D + lane, mask=there), mask=there)
    tl.store(values + to, tl.load(new_values + head * D + lane, mask=there), mask=there)
    tl.store(positions + head * slots + slot, tl.load(newest + head // kv_heads))


@triton.jit(do_not_specialize=["slots", "splits"])
def _received(
    query, keys, positions, weights, largest, received, scaling, stride, slots, splits,
    D: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    SPLITS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What some slots of one (row, KV head) were given, mean of the query heads that share it."""
    head, token = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, lane, split = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, SPLITS)
    real, asked = token < slots, (row < SHARE)[:, None]
    at = (head * splits + split[None, :]) * SHARE + row[:, None]
    summed = asked & (split < splits)[None, :]
    score = tl.load(largest + at, mask=summed, other=NOTHING)
    most = tl.max(score, 1)
    weight = tl.load(weights + at, mask=summed, other=0.0) * tl.exp2(score - most[:, None])
    total = tl.where(row < SHARE, tl.sum(weight, 1), 1.0)
    there = (lane < D)[None, :]
    q = tl.load(query + (head * SHARE + row)[:, None] * D + lane[None, :], mask=asked & there, other=0.0)
    place = head * stride + token[:, None] * D + lane[None, :]
    k = tl.load(keys + place, mask=real[:, None] & there, other=0.0)
    scores = tl.dot(q.to(DOT), tl.trans(k).to(DOT), input_precision="ieee") * (scaling * LOG2_E)
    held = tl.load(positions + head * slots + token, mask=real, other=-1) >= 0
    p = tl.where(asked & held[None, :], tl.exp2(scores - most[:, None]), 0.0) / total[:, None]
    tl.store(received + head * slots + token, tl.sum(p, 0) / SHARE, mask=real)


@triton.jit(do_not_specialize=["slots", "kv_heads", "first"])
def _lowest(
    received, sums, positions, hole, newest, reach, slots, kv_heads, first,
    HOW: tl.constexpr, SUM: tl.constexpr, PLACE: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Of one (row, KV head): the token with the lowest score goes, the newest of them if it is a tie."""
    head = tl.program_id(0).to(tl.int64)
    row = head // kv_heads
    now = tl.load(newest + row)
    last = now - tl.load(reach + row)
    least, youngest, gone = float("inf"), tl.full([], -2, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, slots, MANY):
        slot = start + tl.arange(0, MANY)
        real = slot < slots
        at = head * slots + slot
        position = tl.load(positions + at, mask=real, other=-1)
        if HOW == PLACE:
            score = position.to(tl.float32)
        elif HOW == SUM:
            score = tl.load(sums + at, mask=real, other=0.0) + tl.load(received + at, mask=real, other=0.0)
            tl.store(sums + at, score, mask=real)
        else:
            score = tl.zeros([MANY], tl.float32)
            for other in range(0, kv_heads):
                score += tl.load(received + (row * kv_heads + other) * slots + slot, mask=real, other=0.0)
        may = (position >= first) & (position <= last)
        score = tl.where(may, tl.minimum(score, LARGEST), LARGEST)
        score = tl.where((position >= 0) & (position != now), score, float("inf"))
        low = tl.min(score, 0)
        young = tl.max(tl.where(score == low, position, -2), 0)
        here = tl.max(tl.where((score == low) & (position == young), slot, 0), 0)
        better = (low < least) | ((low == least) & (young > youngest))
        gone = tl.where(better, here, gone)
        youngest = tl.where(better, young, youngest)
        least = tl.minimum(low, least)
    if HOW == SUM:
        tl.debug_barrier()  # what other threads have stored
        tl.store(sums + head * slots + gone, 0.0)
    tl.store(positions + head * slots + gone, -1)
    tl.store(hole + head, gone.to(tl.int64))


def place(move, keys: Tensor, values: Tensor) -> None:
    """The new token of every row `[batch, kv_heads, 1, head_dim]` goes into the slot that is empty."""
    batch, kv_heads, _, head_dim = keys.shape
    (held,), (held_values,) = move.used
    _place[(batch * kv_heads,)](
        held, held_values, keys.contiguous(), values.contiguous(), move.positions, move.hole, move.newest,
        held.stride(1), move.slots, kv_heads,
        D=head_dim, LANES=triton.next_power_of_2(head_dim),
    )  # fmt: skip


def attended(move, query: Tensor, scaling: float) -> tuple[Tensor, Tensor | None]:
    """(Output like query, the attention received by every slot `[batch, kv_heads, slots]`, or None if no keep
    observes)."""
    (held,), (held_values,) = move.used
    kv_heads, share = held.shape[1], query.shape[1] // held.shape[1]
    allowed = None if move.even else (move.positions >= 0)[:, :, None]
    config = gpu.configured("exact", query.shape[3], query.dtype, gpu.ROWS, 1)
    programs = gpu._processors(query) * config[3]
    splits = gpu._splits(programs, len(query) * kv_heads, -(-move.slots // gpu.LEAST))
    found = gpu.partial_sums(query, len(query) * kv_heads, splits, share)
    gpu.launch(query, (held,), (held_values,), "exact", scaling, allowed, None, found, 0, splits, config)
    out, received = gpu.merged(query, found), None
    if move.how in (SUM, NEWEST):
        received = torch.empty(move.positions.shape, device=query.device)
        block = 16 if query.dtype == torch.float32 else BLOCK
        _received[(len(query) * kv_heads, -(-move.slots // block))](
            query.contiguous(), held, move.positions, *found[1:], received, scaling, held.stride(1),
            move.slots, splits,
            D=query.shape[3], SHARE=share, ROWS=max(gpu.ROWS, triton.next_power_of_2(share)), BLOCK=block,
            LANES=triton.next_power_of_2(query.shape[3]),
            SPLITS=triton.next_power_of_2(splits), DOT=gpu.dot_type(query),
        )  # fmt: skip
    return out, received


def let_go(move, received: Tensor | None) -> None:
    """See `Replaces._let_go`."""
    heads, positions = move.hole.numel(), move.positions
    _lowest[(heads,)](
        positions if received is None else received, positions if move.sums is None else move.sums, positions,
        move.hole, move.newest, move.reach, move.slots, positions.shape[1], move.first,
        HOW=move.how, SUM=SUM, PLACE=PLACE, MANY=MANY,
    )  # fmt: skip
    move.newest.add_(1)
