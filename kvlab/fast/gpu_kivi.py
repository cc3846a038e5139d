"""Decode attention over what KIVI holds on a GPU, in Triton: blocks of K, codes of V and a recent window.

K's scale and zero point belong to a channel of a block of tokens, so they go into the query, once a block:
q . (code * scale + zero) = (q * scale) . code + q . zero. A program of `_attend_written` runs through blocks,
long ones in tiles; V becomes numbers in registers, as every token has scales of its own. The window, in full
precision, is a split more (`_attend_window`), and `gpu._merge` puts all splits together. The reference is
`KiviState.read`, then `attention.attend`.

Layouts as in `store/kivi.py`: codes `[batch, kv_heads, written, width]`, K's fp16 scales and zero points
`[batch, kv_heads, blocks, head_dim]`, V's `[batch, kv_heads, written, groups]`; the first block may be short.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import LOG2_E, NOTHING

LEAST_SIDE = 16  # of a tensor-core product
NUMBERS = {torch.float32: 32 * 128}  # of V that a program holds in registers at a time: more are spilled
NUMBERS_16 = 64 * 128  # of 16 bits
# What changes while a cache grows: a kernel compiled for one value serves all.
VARYING = ("count", "recent", "tiles", "split", "parts", "kv_heads", "allowed_heads")


@triton.jit
def _numbers(codes, place, BITS: tl.constexpr):
    """Codes as loaded -> fp32 numbers before scaling; `place` says which part of each byte is meant."""
    if BITS == 8:
        return codes.to(tl.float32)
    else:
        unsigned = (codes.to(tl.int32) >> (place * BITS)) & (2**BITS - 1)
        return (unsigned - 2 ** (BITS - 1)).to(tl.float32)


@triton.jit
def _softened(scores, seen, real, most, weight):
    """One step of the online softmax: (p, largest score, sum of weights, factor of what was there before)."""
    scores = tl.where(seen[None, :], scores, NOTHING)
    highest = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - highest)
    p = tl.where(real[None, :], tl.exp2(scores - highest[:, None]), 0.0)
    return p, highest, weight * shrink + tl.sum(p, 1), shrink


@triton.jit(do_not_specialize=list(VARYING))
def _attend_written(
    query, keys, key_scales, key_zeros, values, value_scales, value_zeros, allowed, sums, weights, largest,
    count, recent, tiles, split, parts, scaling, kv_heads, allowed_heads,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SHARED: tl.constexpr, MASKED: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    LANES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One split, of `split` tiles, of one (row, KV head): sums `[SHARE, D]` of weighted V, sum of weights,
    largest score.

    GROUP: tokens of a block; SHARED: channels of V with one scale. BLOCK: tokens of a tile; the last one of a
    block may reach beyond it. LANES and CHANNELS are the bytes of a token's codes and D, or more, whose last
    entries hold zeros."""
    WIDTH: tl.constexpr = D * BITS // 8  # bytes of a token's codes
    HALF: tl.constexpr = 2 ** (BITS - 1)  # `_numbers` says code - HALF, which rounds less than code does
    TILES: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK  # of a block
    head, part, blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tiles // TILES
    keys, values = keys + head * count * WIDTH, values + head * count * WIDTH
    key_scales, key_zeros = key_scales + head * blocks * D, key_zeros + head * blocks * D
    value_scales += head * count * (D // SHARED)
    value_zeros += head * count * (D // SHARED)
    allowed += (head // kv_heads * allowed_heads + head % kv_heads % allowed_heads) * (count + recent)
    short = blocks * GROUP - count  # tokens that the first block lacks
    row, lane, channel = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, CHANNELS)
    inside = lane < WIDTH
    asked = (row < SHARE)[:, None] & inside[None, :]
    query += head * SHARE * D + row[:, None] * D

    most = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tile in range(part * split, min(tiles, (part + 1) * split)):
        block, place = tile // TILES, tile % TILES * BLOCK + tl.arange(0, BLOCK)
        token = block * GROUP - short + place
        real = (place < GROUP) & (token >= 0)
        held, held_v = real[:, None] & inside[None, :], real[:, None] & (channel < D)[None, :]
        # q . K: one product for each channel of a byte; what the zero points give is the same for all tokens
        scores, offset = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS], tl.float32)
        codes = tl.load(keys + token[:, None] * WIDTH + lane[None, :], mask=held, other=0)
        for run in tl.static_range(D // WIDTH):
            at = block * D + run * WIDTH + lane
            scale = tl.load(key_scales + at, mask=inside, other=0.0).to(tl.float32)
            zero = tl.load(key_zeros + at, mask=inside, other=0.0).to(tl.float32) + HALF * scale
            q = tl.load(query + run * WIDTH + lane[None, :], mask=asked, other=0.0).to(tl.float32)
            code = tl.where(held, _numbers(codes, run, BITS), 0.0)
            scores += tl.dot((q * scale[None, :]).to(DOT), tl.trans(code).to(DOT), input_precision="ieee")
            offset += tl.sum(q * zero[None, :], 1)
        seen = real
        if MASKED:
            seen = real & tl.load(allowed + token, mask=real, other=0).to(tl.int1)
        p, most, weight, shrink = _softened(
            (scores + offset[:, None]) * (scaling * LOG2_E), seen, real, most, weight
        )
        # p . V: all channels of a byte in one tile
        codes = tl.load(values + token[:, None] * WIDTH + channel[None, :] % WIDTH, mask=held_v, other=0)
        at = token[:, None] * (D // SHARED) + channel[None, :] // SHARED
        v = _numbers(codes, (channel // WIDTH)[None, :], BITS) + HALF
        v *= tl.load(value_scales + at, mask=held_v, other=0.0).to(tl.float32)
        v += tl.load(value_zeros + at, mask=held_v, other=0.0).to(tl.float32)
        summed = tl.dot(p.to(DOT), v.to(DOT), input_precision="ieee")
        total = total * shrink[:, None] + summed

    mine = (head * parts + part) * SHARE + row
    written = (row < SHARE)[:, None] & (channel < D)[None, :]
    tl.store(sums + mine[:, None] * D + channel[None, :], total, mask=written)
    tl.store(weights + mine, weight, mask=row < SHARE)
    tl.store(largest + mine, most, mask=row < SHARE)


@triton.jit(do_not_specialize=list(VARYING))
def _attend_window(
    query, keys, values, allowed, sums, weights, largest,
    count, recent, parts, scaling, kv_heads, allowed_heads,
    D: tl.constexpr, MASKED: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    DOT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last split of one (row, KV head): `recent` tokens as they are, K and V `[recent, D]`, which follow
    `count` written ones."""
    head = tl.program_id(0).to(tl.int64)
    keys, values = keys + head * recent * D, values + head * recent * D
    allowed += (head // kv_heads * allowed_heads + head % kv_heads % allowed_heads) * (count + recent) + count
    row, channel = tl.arange(0, ROWS), tl.arange(0, CHANNELS)
    written = (row < SHARE)[:, None] & (channel < D)[None, :]
    q = tl.load(query + head * SHARE * D + row[:, None] * D + channel[None, :], mask=written, other=0.0)

    most = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, recent, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = token < recent
        held = real[:, None] & (channel < D)[None, :]
        k = tl.load(keys + token[:, None] * D + channel[None, :], mask=held, other=0.0)
        scores = tl.dot(q.to(DOT), tl.trans(k).to(DOT), input_precision="ieee")
        seen = real
        if MASKED:
            seen = real & tl.load(allowed + token, mask=real, other=0).to(tl.int1)
        p, most, weight, shrink = _softened(scores * (scaling * LOG2_E), seen, real, most, weight)
        v = tl.load(values + token[:, None] * D + channel[None, :], mask=held, other=0.0)
        total = total * shrink[:, None] + tl.dot(p.to(DOT), v.to(DOT), input_precision="ieee")

    mine = (head * parts + parts - 1) * SHARE + row
    tl.store(sums + mine[:, None] * D + channel[None, :], total, mask=written)
    tl.store(weights + mine, weight, mask=row < SHARE)
    tl.store(largest + mine, most, mask=row < SHARE)


def supports(store, head_dim: int) -> bool:
    """Whether these kernels read a `KiviState`: something is written, and the head
    dimensions of K and V are the same multiple of 16, up to 256."""
    fits = store.written > 0 and head_dim % LEAST_SIDE == 0 and head_dim <= 256
    return fits and store.window[1].shape[3] == head_dim


def attend(
    query: Tensor, store, scaling: float, allowed: Tensor | None = None, split: int | None = None
) -> Tensor:
    """Attention of one query per head over what a `KiviState` holds.

    query `[batch, heads, 1, head_dim]`; allowed bool `[batch, 1 or kv_heads, 1, tokens]` or None, tokens
    those of the window included; split: tiles of a split (default: see `gpu._splits`).
    Returns `[batch, heads, 1, head_dim]` in query's dtype.
    Raises ValueError for a store that `supports` refuses and for more than one query.
    """
    batch, heads, queries, head_dim = query.shape
    if queries != 1 or not supports(store, head_dim):
        raise ValueError(
            f"kivi: no kernel for {queries} queries of head dimension {head_dim} and "
            f"{store.written} written tokens"
        )
    parts = [part.contiguous() for part in (*store.keys, *store.blocks, *store.values)]
    window = [part.contiguous() for part in store.window]
    kv_heads, count = parts[0].shape[1:3]
    recent, share, channels = window[0].shape[2], heads // kv_heads, triton.next_power_of_2(head_dim)
    block = min(triton.next_power_of_2(store.group), NUMBERS.get(query.dtype, NUMBERS_16) // channels)
    block = max(LEAST_SIDE, block)  # tokens of a tile
    tiles = -(-store.group // block) * parts[1].shape[2]
    if split is None:
        least = -(-128 // min(block, store.group))  # tiles of a split at least
        split = -(-tiles // gpu._splits(3 * gpu._processors(query), batch * kv_heads, -(-tiles // least)))
    splits = -(-tiles // split) + 1
    query = query.contiguous()
    found = gpu.partial_sums(query, batch * kv_heads, splits, share)
    mask = query if allowed is None else allowed.expand(batch, -1, -1, -1).contiguous().view(torch.uint8)
    same = {
        "D": head_dim, "MASKED": allowed is not None, "SHARE": share, "CHANNELS": channels,
        "ROWS": max(gpu.ROWS, triton.next_power_of_2(share)),
        "DOT": tl.float32 if gpu.INTERPRETED else gpu.TYPES[query.dtype],
    }  # fmt: skip
    _attend_written[(batch * kv_heads, splits - 1)](
        query, *parts, mask, *found,
        count, recent, tiles, split, splits, scaling, kv_heads, mask.shape[1],
        BITS=8 * parts[0].shape[3] // head_dim, GROUP=store.group, SHARED=head_dim // parts[-1].shape[3],
        BLOCK=block, LANES=max(LEAST_SIDE, triton.next_power_of_2(parts[0].shape[3])), **same,
    )  # fmt: skip
    _attend_window[(batch * kv_heads,)](
        query, *window, mask, *found, count, recent, splits, scaling, kv_heads, mask.shape[1],
        BLOCK=16 if query.dtype == torch.float32 else 64, **same,
    )  # fmt: skip
    return gpu.merged(query, found)
