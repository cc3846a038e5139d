"""Decode attention over what KIVI holds on a GPU, in Triton: blocks of K, codes of V and a recent window.

K's scale and zero point belong to a channel of a block of tokens, so they go into the query, once a block:
q . (code * scale + zero) = (q * scale) . code + q . zero. V's belong to a token and a group of channels,
which has rows of its own, as in `gpu.py`: p . (code * scale + zero) = (p * scale) . code + p . zero, and the
last sum is one number for all channels. Zero points are never rounded to the product's dtype.

A program of `_attend_written` runs through blocks, long ones in tiles. The window, in full precision, is a
split more, and all are put together as in `gpu.py`. The reference: `KiviState.read`, then `attention.attend`.

Layouts as in `store/kivi.py`: codes `[batch, kv_heads, written, width]`, K's fp16 scales and zero points
`[batch, kv_heads, blocks, head_dim]`, V's `[batch, kv_heads, written, groups]`; the first block may be short.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu
from .gpu import LOG2_E, NOTHING, channels, even, kept, scales_of, softened, weighed
from .gpu_numbers import WORDS, numbers

LEAST = 16  # tokens of a tensor-core product at least
# What changes while a cache grows: a kernel compiled for one value serves all.
VARYING = ("count", "splits", "block_stride", "scale_stride", "kv_heads", "allowed_row", "allowed_head")


@triton.jit
def _of_block(scales, zeros, at, lane, PARTS, BYTES, WIDTH, D):
    """Scales and zero points of a block's channels, as the words have them."""
    held, found, more = (lane < D // PARTS)[None, :], (), ()
    for one in tl.static_range(PARTS):
        channel = at + channels(lane, one, BYTES, WIDTH)
        found += (tl.load(scales + channel, mask=held, other=0.0),)
        more += (tl.load(zeros + channel, mask=held, other=0.0),)
    return found, more


@triton.jit(do_not_specialize=list(VARYING))
def _attend_written(
    query, keys, key_scales, key_zeros, values, value_scales, value_zeros, allowed, sums, weights, largest,
    count, splits, scaling, code_stride, block_stride, scale_stride, kv_heads, allowed_row, allowed_head,
    FORM: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One split of one (row, KV head): sums `[SHARE, D]` of weighted V, sum of weights, largest score.

    GROUP: tokens of a block; BLOCK: those of a tile, the last one of a block may reach beyond it. HALF: what
    `numbers` says less than the code. GROUPS: scales of a token's V. BYTES, WIDTH, LANES as in `gpu.py`."""
    SPREAD: tl.constexpr = triton.next_power_of_2(GROUPS)  # rows of a query head
    TILES: tl.constexpr = (GROUP + BLOCK - 1) // BLOCK  # of a block
    head, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if COUNTED:
        count = tl.load(count)
    keys, values = keys + head * code_stride, values + head * code_stride
    key_scales, key_zeros = key_scales + head * block_stride, key_zeros + head * block_stride
    value_scales, value_zeros = value_scales + head * scale_stride, value_zeros + head * scale_stride
    allowed += head // kv_heads * allowed_row + head % kv_heads * allowed_head
    row, lane = tl.arange(0, ROWS), tl.arange(0, LANES)
    group, real_lane = row % SPREAD, (lane < D // 4)[None, :]
    at = (head * SHARE + row // SPREAD)[:, None] * D

    asked, total = (), ()
    for one in tl.static_range(4):
        mine = (row < SHARE * SPREAD)[:, None] & real_lane
        q = tl.load(query + at + channels(lane, one, BYTES, WIDTH), mask=mine, other=0.0)
        asked += (q.to(tl.float32),)
        total += (tl.zeros([ROWS, LANES], tl.float32),)
    most, weight = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    shift = tl.zeros([ROWS, BLOCK], tl.float32)  # p . zero, of every column
    blocks = (count + GROUP - 1) // GROUP
    short = blocks * GROUP - count  # tokens that the first block lacks
    first, last = part * (blocks * TILES) // parts, (part + 1) * (blocks * TILES) // parts
    for tile in tl.range(first, last):
        block, place = tile // TILES, tile % TILES * BLOCK + tl.arange(0, BLOCK)
        token = block * GROUP - short + place
        real = (place < GROUP) & (token >= 0)
        held = real[:, None] & real_lane
        where = token.to(tl.int64)[:, None] * (D // 4) + lane[None, :]
        scale, zero = _of_block(key_scales, key_zeros, block * D, lane, 4, BYTES, WIDTH, D)
        code = numbers(tl.trans(tl.load(keys + where, mask=held, other=0)), FORM, DOT)
        scores, offset = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
        for one in tl.static_range(4):
            step = scale[one].to(tl.float32)
            scores = tl.dot((asked[one] * step).to(DOT), code[one], scores, input_precision="ieee")
            offset += asked[one] * (zero[one].to(tl.float32) + HALF * step)
        scores = (scores + tl.sum(offset, 1)[:, None]) * (scaling * LOG2_E)
        p, most, weight, shrink = softened(scores, allowed, token, real, most, weight, MASKED)
        step = scales_of(value_scales, token, real, group, GROUPS, SPREAD).to(tl.float32)
        zero_v = scales_of(value_zeros, token, real, group, GROUPS, SPREAD).to(tl.float32)
        shift = shift * shrink + p * (zero_v + HALF * step)
        total = weighed(p * step, values, where, held, total, shrink, FORM, DOT, 4)
    found = (head * splits + part) * SHARE + row // SPREAD
    kept(sums, weights, largest, found, total, tl.sum(shift, 1), weight, most, row, lane,
         D, GROUPS, SPREAD, SHARE, 4, BYTES, WIDTH)  # fmt: skip


def supports(store, head_dim: int) -> bool:
    """Whether these kernels read what KIVI holds: something is written, the head dimensions of K and V are
    the same multiple of 16, up to 256, and a token's V has 64 scales at most."""
    if store.keys is None or not store.keys[0].shape[2] or head_dim % 16 or head_dim > 256:
        return False
    return store.recents[1].shape[3] == head_dim and store.values[1].shape[3] <= 64


def attend(
    query: Tensor, store, scaling: float, allowed: Tensor | None = None, split: int | None = None,
    counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per head over what a `KiviState`, or one in longer buffers, holds.

    query `[batch, heads, 1, head_dim]`; allowed bool `[batch, 1 or kv_heads, 1, tokens]` or None, tokens
    those of the window included; split: tiles of a split, about (default: see `gpu._splits`). counts: int32
    `[2]` on the device: so many written and recent tokens, the first, are in `keys`, `values`, `blocks` and
    `recents`; the host does not read it (None: all are).
    Returns `[batch, heads, 1, head_dim]` in query's dtype.
    Raises ValueError for a store that `supports` refuses and for more than one query.
    """
    batch, heads, queries, head_dim = query.shape
    if queries != 1 or not supports(store, head_dim):
        written = 0 if store.keys is None else store.keys[0].shape[2]
        raise ValueError(
            f"kivi: no kernel for {queries} queries of head dimension {head_dim} and {written} written tokens"
        )
    window = store.window if counts is None else store.recents
    (codes, codes_v), (scales, zeros) = even(*store.keys, store.values[0]), even(*store.blocks)
    scales_v, zeros_v = even(*store.values[1:])
    kv_heads, written, width = codes.shape[1:]
    kind = f"int{8 * width // head_dim}"
    codes, codes_v = (part.view(gpu.SIGNED[WORDS[kind]]) for part in (codes, codes_v))
    rows = max(
        gpu.ROWS, triton.next_power_of_2(heads // kv_heads) * triton.next_power_of_2(scales_v.shape[3])
    )
    fp32 = query.dtype == torch.float32
    block = min(triton.next_power_of_2(store.group), 16 if fp32 else 64 if head_dim <= 128 else 32)
    block = max(LEAST, block)  # tokens of a tile
    # Warps, stages of loads, programs of a processor, as measured on an H200.
    warps, stages, programs = (2, 3, 4) if block <= 32 else (4, 2, 2)
    tiles = -(-store.group // block) * scales.shape[2]
    if split is None:
        least = -(-gpu.LEAST // min(block, store.group))  # tiles of a split at least
        parts = gpu._splits(programs * gpu._processors(query), batch * kv_heads, -(-tiles // least))
    else:
        parts = -(-tiles // split)
    found = gpu.partial_sums(query, batch * kv_heads, parts + 1, heads // kv_heads)
    before, after = (None, None) if allowed is None else (allowed[..., :written], allowed[..., written:])
    mask, *strides = gpu.visible(query, before, kv_heads)
    _attend_written[(batch * kv_heads, parts)](
        query.contiguous(), codes, scales, zeros, codes_v, scales_v, zeros_v, mask, *found,
        written if counts is None else counts, parts + 1, scaling,
        codes.stride(1), scales.stride(1), scales_v.stride(1), kv_heads, *strides,
        FORM=kind, D=head_dim, GROUPS=scales_v.shape[3],
        MASKED=allowed is not None, COUNTED=counts is not None,
        SHARE=heads // kv_heads, ROWS=rows, BLOCK=block, DOT=gpu.dot_type(query),
        GROUP=store.group, HALF=2 ** (8 * width // head_dim - 1), BYTES=WORDS[kind], WIDTH=width,
        LANES=max(LEAST, triton.next_power_of_2(head_dim // 4)), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    recent = None if counts is None else counts[1:]
    settings = 16 if fp32 or head_dim > 128 else 64, 4, 2, 1
    launch = (query, window[:1], window[1:], "exact", scaling, after, recent, found, parts, 1, settings)
    gpu.launch(*launch)
    return gpu.merged(query, found)
