"""Decode attention over packed K and V on a GPU, in Triton.

A decode step is bound by memory, so K and V cross the memory bus as they are stored, and become numbers in
registers (`gpu_numbers.py`). Flash-decoding (Dao et al. 2023): `_attend_split` runs through one split of the
sequence of one (row, KV head) with an online softmax, `_merge` puts the splits of one query head together.
The reference is `decode` of the format, then `attention.attend`.

No scale meets V: it multiplies a token's score, or its probability. A product has sixteen rows at least, more
than query heads share a KV head. So every (query head, group of channels with one scale) has its own row:
it sees its group's channels of K, and of what it sums up of V those alone are kept.

Layouts as in `store/int.py`: codes `[batch, kv_heads, tokens, width]`, where a byte of int4 or int2 holds
a channel of each half or quarter of the head, and scales `[batch, kv_heads, tokens, groups]`. Triton
comes with torch's CUDA builds. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu_append import append, appends
from .gpu_numbers import INTERPRETED, WORDS, kind_of, numbers, supports

__all__ = ["append", "appends", "attend", "compiles", "supports"]

LEAST, MOST = 512, 256  # tokens of a split at least, splits of a sequence at most
SLICE = 32  # channels that are put together at a time
ROWS = 16  # fewest rows of a tensor-core product
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
SIGNED = {4: torch.int32, 2: torch.int16, 1: torch.int8}  # by bytes
NOTHING = tl.constexpr(-1e30)  # score of what may not be seen; finite, so that no split is NaN
LOG2_E = tl.constexpr(math.log2(math.e))
# What changes while a cache grows: a kernel compiled for one value serves all.
VARYING = ("count", "splits", "first_part", "kv_heads", "scale_stride", "allowed_row", "allowed_head")


@triton.jit
def channels(lane, one, BYTES: tl.constexpr, WIDTH: tl.constexpr):
    """The channel that is number `one` of each word: of BYTES neighbours in every part of WIDTH channels."""
    return (BYTES * lane + one % BYTES + one // BYTES * WIDTH)[None, :]


@triton.jit
def scales_of(base, token, real, group, GROUPS: tl.constexpr, SPREAD: tl.constexpr):
    """Of every token one scale `[1, BLOCK]`, or that of each row's group `[ROWS, BLOCK]`."""
    if SPREAD == 1:
        return tl.load(base + token, mask=real, other=0.0)[None, :]
    else:
        there = real[None, :] & (group < GROUPS)[:, None]
        return tl.load(base + token[None, :] * GROUPS + group[:, None], mask=there, other=0.0)


@triton.jit
def softened(scores, allowed, token, real, most, weight, MASKED: tl.constexpr):
    """A step of the online softmax, in powers of two: (weights p, largest score, p summed up in every column,
    by what all that came before shrinks)."""
    seen = real
    if MASKED:
        seen = real & tl.load(allowed + token, mask=real, other=0).to(tl.int1)
    scores = tl.where(seen[None, :], scores, NOTHING)
    highest = tl.maximum(most, tl.max(scores, 1))
    shrink = tl.exp2(most - highest)[:, None]
    p = tl.where(real[None, :], tl.exp2(scores - highest[:, None]), 0.0)
    return p, highest, weight * shrink + p, shrink


@triton.jit
def weighed(
    p, values, place, held, total, shrink, FORM: tl.constexpr, DOT: tl.constexpr, PARTS: tl.constexpr
):
    """p . V on top of what shrinks."""
    code, p, grown = numbers(tl.load(values + place, mask=held, other=0), FORM, DOT), p.to(DOT), ()
    for one in tl.static_range(PARTS):
        grown += (tl.dot(p, code[one], total[one] * shrink, input_precision="ieee"),)
    return grown


@triton.jit
def kept(
    sums, weights, largest, found, total, more, weight, most, row, lane,
    D: tl.constexpr, GROUPS: tl.constexpr, SPREAD: tl.constexpr, SHARE: tl.constexpr, PARTS: tl.constexpr,
    BYTES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store a split at `found`: of every row the channels of its group, `more` added to each."""
    there = row < SHARE * SPREAD
    for one in tl.static_range(PARTS):
        channel = channels(lane, one, BYTES, WIDTH)
        mine = there[:, None] & (lane < D // PARTS)[None, :]
        if SPREAD > 1:
            mine = mine & (channel // (D // GROUPS) == (row % SPREAD)[:, None])
        tl.store(sums + found[:, None] * D + channel, total[one] + more[:, None], mask=mine)
    first = there & (row % SPREAD == 0)
    tl.store(weights + found, tl.sum(weight, 1), mask=first)
    tl.store(largest + found, most, mask=first)


@triton.jit(do_not_specialize=list(VARYING))
def _attend_split(
    query, keys, key_scales, values, value_scales, allowed, sums, weights, largest,
    count, splits, first_part, scaling, code_stride, scale_stride, kv_heads, allowed_row, allowed_head,
    FORM: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, MASKED: tl.constexpr, COUNTED: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    PARTS: tl.constexpr, BYTES: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One split of one (row, KV head): sums `[SHARE, D]` of weighted V, sum of weights, largest score. Splits
    have the same number of blocks, give or take one; they are `first_part` and the following of all `splits`.

    GROUPS: scales of a token, 0: none. A word has PARTS channels: BYTES neighbours in each part of a head of
    WIDTH bytes. LANES: words of a token, or more, whose last lanes hold zeros."""
    SPREAD: tl.constexpr = 1 if GROUPS < 2 else triton.next_power_of_2(GROUPS)  # rows of a query head
    HELD: tl.constexpr = D // PARTS  # words of a token
    head, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if COUNTED:
        count = tl.load(count)
    keys, values = keys + head * code_stride, values + head * code_stride
    key_scales, value_scales = key_scales + head * scale_stride, value_scales + head * scale_stride
    allowed += head // kv_heads * allowed_row + head % kv_heads * allowed_head
    row, lane, tile = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, BLOCK)
    group, real_lane = row % SPREAD, (lane < HELD)[None, :]
    at = (head * SHARE + row // SPREAD)[:, None] * D

    asked, total = (), ()
    for one in tl.static_range(PARTS):
        channel = channels(lane, one, BYTES, WIDTH)
        mine = (row < SHARE * SPREAD)[:, None] & real_lane
        if SPREAD > 1:
            mine = mine & (channel // (D // GROUPS) == group[:, None])
        asked += (tl.load(query + at + channel, mask=mine, other=0.0).to(DOT),)
        total += (tl.zeros([ROWS, LANES], tl.float32),)
    most = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS, BLOCK], tl.float32)
    blocks = (count + BLOCK - 1) // BLOCK
    first, last = part * blocks // parts, (part + 1) * blocks // parts
    if GROUPS > 0:  # loaded a block ahead
        token = first * BLOCK + tile
        key_next = scales_of(key_scales, token, token < count, group, GROUPS, SPREAD)
        value_next = scales_of(value_scales, token, token < count, group, GROUPS, SPREAD)
    for block in tl.range(first, last):
        token = block * BLOCK + tile
        real = token < count
        held = real[:, None]
        if LANES != HELD:
            held = held & real_lane
        place = token.to(tl.int64)[:, None] * HELD + lane[None, :]
        # q . K: the scale is applied to the sum
        code = numbers(tl.trans(tl.load(keys + place, mask=held, other=0)), FORM, DOT)
        scores = tl.zeros([ROWS, BLOCK], tl.float32)
        for one in tl.static_range(PARTS):
            scores = tl.dot(asked[one], code[one], scores, input_precision="ieee")
        if GROUPS > 0:
            scores *= key_next.to(tl.float32)
            key_next = scales_of(key_scales, token + BLOCK, token + BLOCK < count, group, GROUPS, SPREAD)
        if SPREAD > 1:
            scores = tl.sum(tl.reshape(scores, [ROWS // SPREAD, SPREAD, BLOCK]), 1)
            scores = tl.broadcast_to(scores[:, None, :], [ROWS // SPREAD, SPREAD, BLOCK])
            scores = tl.reshape(scores, [ROWS, BLOCK])
        scores *= scaling * LOG2_E
        p, most, weight, shrink = softened(scores, allowed, token, real, most, weight, MASKED)
        if GROUPS > 0:
            p *= value_next.to(tl.float32)
            value_next = scales_of(value_scales, token + BLOCK, token + BLOCK < count, group, GROUPS, SPREAD)
        total = weighed(p, values, place, held, total, shrink, FORM, DOT, PARTS)
    found = (head * splits + first_part + part) * SHARE + row // SPREAD
    kept(sums, weights, largest, found, total, tl.zeros([ROWS], tl.float32), weight, most, row, lane,
         D, GROUPS, SPREAD, SHARE, PARTS, BYTES, WIDTH)  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _merge(
    sums, weights, largest, out, splits,
    SHARE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The splits of some channels of one query head: sums `[KV heads of all rows, splits, SHARE, D]` -> out
    `[heads, D]`."""
    head, channel = tl.program_id(0).to(tl.int64), tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    split = tl.arange(0, SPLITS)
    at, real = head // SHARE * splits * SHARE + head % SHARE + split * SHARE, split < splits
    score = tl.load(largest + at, mask=real, other=NOTHING)
    factor = tl.where(real, tl.exp2(score - tl.max(score, 0)), 0.0)
    weight = tl.sum(factor * tl.load(weights + at, mask=real, other=0.0), 0)
    there = real[:, None] & (channel < D)[None, :]
    parts = tl.load(sums + at[:, None] * D + channel[None, :], mask=there, other=0.0)
    tl.store(out + head * D + channel, tl.sum(factor[:, None] * parts, 0) / weight, mask=channel < D)


def compiles(capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability (None: interpreted) knows what numbers are made of: bf16, from
    8.0 on."""
    return capability is None or capability >= (8, 0)


def configured(kind: str, head_dim: int, dtype: torch.dtype, rows: int, groups: int) -> tuple[int, ...]:
    """Tokens that a program holds in registers at a time, its warps, stages of its loads, such programs on a
    processor: measured on an H200 with heads of 128. fp32 products need many registers, 16-bit ones few."""
    if dtype == torch.float32:
        return 16, 4, 2, 3
    if kind == "exact" and head_dim <= 128:
        return 64, 4, 4, 1
    if head_dim <= 64:
        return 32, 2, 3, 6
    if head_dim > 128 or rows > ROWS:
        return 32, 4, 3, 2
    if groups > 1:
        return (64, 2, 3, 4) if kind == "int4" else (64, 4, 3, 3)
    return 128, 4, 3, {"int4": 4, "int2": 3}.get(kind, 2)


def attend(
    query: Tensor, keys, values, form, scaling: float, allowed=None, split: int | None = None,
    count: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of one query per head over packed K and V.

    query `[batch, heads, 1, head_dim]`; keys, values: what `form.encode` returned; allowed bool `[batch, 1 or
    kv_heads, 1, tokens]` or None; split: tokens of a split, about (default: see `_splits`). count: int32
    `[1]` on the device: so many tokens, the first, are there (None: all); the host does not read it.
    Returns `[batch, heads, 1, head_dim]` in query's dtype.
    Raises ValueError for a format that `supports` refuses and for more than one query.
    """
    batch, heads, queries, head_dim = query.shape
    if queries != 1 or not supports(form, head_dim):
        name = type(form).__name__
        raise ValueError(f"{name}: no kernel for {queries} queries of head dimension {head_dim}")
    kv_heads, tokens = keys[0].shape[1:3]
    sequences, share = batch * kv_heads, heads // kv_heads
    groups = keys[1].shape[3] if len(keys) > 1 else 1
    config = configured(kind_of(form), head_dim, query.dtype, _rows(share, keys), groups)
    if split is None:
        splits = _splits(_processors(query) * config[3], sequences, -(-tokens // LEAST))
    else:
        splits = -(-tokens // split)
    found = partial_sums(query, sequences, splits, share)
    launch(query, keys, values, kind_of(form), scaling, allowed, count, found, 0, splits, config)
    return merged(query, found)


def _rows(share: int, parts) -> int:
    """Rows of a product: query heads that share a KV head, times scales of a token."""
    groups = parts[1].shape[3] if len(parts) > 1 else 1
    return max(ROWS, triton.next_power_of_2(share) * triton.next_power_of_2(groups))


def launch(
    query: Tensor, keys, values, kind: str, scaling: float, allowed, count, found, first, parts, config,
):  # fmt: skip
    """Attend to K and V in so many parts, which are those from `first` on of `found`."""
    batch, heads, _, head_dim = query.shape
    kv_heads, tokens = keys[0].shape[1:3]
    (codes, codes_v), (scales, scales_v) = even(keys[0], values[0]), even(keys[-1], values[-1])
    numbers_, size = (1, 1) if kind == "exact" else (4, WORDS[kind])
    if kind != "exact":
        codes, codes_v = (part.view(SIGNED[size]) for part in (codes, codes_v))
    block, warps, stages, _ = config
    mask, *strides = visible(query, allowed, kv_heads)
    _attend_split[(batch * kv_heads, parts)](
        query.contiguous(), codes, scales, codes_v, scales_v, mask, *found,
        tokens if count is None else count, found[0].shape[1], first, scaling,
        codes.stride(1), scales.stride(1), kv_heads, *strides,
        FORM=kind, D=head_dim, GROUPS=keys[1].shape[3] if len(keys) > 1 else 0,
        MASKED=allowed is not None, COUNTED=count is not None,
        SHARE=heads // kv_heads, ROWS=_rows(heads // kv_heads, keys), BLOCK=block, DOT=dot_type(query),
        PARTS=numbers_, BYTES=size, WIDTH=keys[0].shape[3],
        LANES=max(16, triton.next_power_of_2(head_dim // numbers_)), num_warps=warps, num_stages=stages,
    )  # fmt: skip


def dot_type(query: Tensor):
    return tl.float32 if INTERPRETED else TYPES[query.dtype]


def visible(query: Tensor, allowed: Tensor | None, kv_heads: int) -> tuple[Tensor, int, int]:
    """The mask as bytes, and its strides from row to row and from KV head to KV head."""
    if allowed is None:
        return query, 0, 0
    mask = allowed.expand(query.shape[0], kv_heads, -1, -1).view(torch.uint8)
    mask = mask if mask.stride(3) == 1 else mask.contiguous()
    return mask, mask.stride(0), mask.stride(1)


def partial_sums(query: Tensor, sequences: int, splits: int, share: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for every split's sums, weights and largest score. One by one, so that each begins where memory is
    aligned: else a kernel is compiled for every alignment."""
    like = {"device": query.device, "dtype": torch.float32}
    shape = sequences, splits, share
    return torch.empty(*shape, query.shape[3], **like), torch.empty(shape, **like), torch.empty(shape, **like)


def merged(query: Tensor, found: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """All splits together, shaped like the query."""
    sequences, splits, share, head_dim = found[0].shape
    out = torch.empty_like(query, dtype=torch.float32 if INTERPRETED else query.dtype)
    _merge[(sequences * share, -(-head_dim // SLICE))](
        *found, out, splits,
        SHARE=share, D=head_dim, SPLITS=triton.next_power_of_2(splits), SLICE=SLICE,
    )  # fmt: skip
    return out.to(query.dtype)


def even(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V with the same strides: tokens one after the other, (row, head) pairs equally far apart."""
    even = all(
        part.stride(3) == 1
        and part.stride(2) == part.shape[3]
        and part.stride(0) == part.shape[1] * part.stride(1)
        for part in (keys, values)
    )
    same = keys.stride() == values.stride()
    return (keys, values) if even and same else (keys.contiguous(), values.contiguous())


def _processors(query: Tensor) -> int:
    return torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1


@cache
def _splits(programs: int, sequences: int, most: int) -> int:
    """Splits of every sequence, at most `most`: the fewest that keep processors nearly as busy as any number
    does. What does not fill a last round of programs leaves them idle (as in Dao et al. 2023)."""
    busy = {}
    for splits in range(1, min(most, MOST) + 1):
        rounds = sequences * splits / programs
        busy[splits] = rounds / math.ceil(rounds)
    enough = 0.9 * max(busy.values())
    return next(splits for splits, part in busy.items() if part >= enough)
