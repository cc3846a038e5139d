"""Decode attention over packed K and V on a GPU, in Triton.

A decode step is bound by memory, so K and V cross the memory bus as they are stored, and become numbers in
registers. Flash-decoding (Dao et al. 2023): `_attend_split` runs through one split of the sequence of one
(row, KV head) with an online softmax, `_merge` puts the splits of one query head together. The query heads
of a group share every load. The reference is `decode` of the format, then `attention.attend`.

Layouts as in `store/int.py`: codes `[batch, kv_heads, tokens, width]`, where a byte of int4 or int2 holds
a channel of each half or quarter of the head, and fp16 scales `[batch, kv_heads, tokens, groups]`. Triton
comes with torch's CUDA builds. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, slowly.
"""

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..store import Float8, Int

BLOCKS = {torch.float32: 16}  # tokens that a program holds in registers at a time: fp32 products need many
BLOCK = 64  # and 16-bit ones few
LEAST, MOST = 2, 256  # blocks of a split at least, and splits of a sequence at most
CHUNK = 16  # splits that are put together at a time
ROWS = 16  # fewest rows of a tensor-core product: the query heads of a group, and rows of zeros
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
INTERPRETED = triton.knobs.runtime.interpret  # the interpreter cannot multiply bf16, nor round to it
NOTHING = tl.constexpr(-1e30)  # score of what may not be seen; finite, so that no split is NaN
# What changes while a cache grows: a kernel compiled for one value serves all.
VARYING = ("count", "split", "scale_stride", "kv_heads", "allowed_stride", "allowed_heads", "splits")


@triton.jit
def _numbers(codes, place, BITS: tl.constexpr):
    """Codes as loaded -> fp32 numbers before scaling; `place` says which part of each byte is meant."""
    if BITS == 8:  # int8 or float8
        return codes.to(tl.float32)
    else:
        unsigned = (codes.to(tl.int32) >> (place * BITS)) & (2**BITS - 1)
        return (unsigned - 2 ** (BITS - 1)).to(tl.float32)


@triton.jit(do_not_specialize=list(VARYING[:-1]))
def _attend_split(
    query, keys, key_scales, values, value_scales, allowed, sums, weights, largest,
    count, split, scaling, code_stride, scale_stride, kv_heads, allowed_stride, allowed_heads,
    BITS: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr,
    SHARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr,
    RUN: tl.constexpr, LANES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One split of one (row, KV head): sums `[SHARE, D]` of weighted V, sum of weights, largest score.

    RUN: neighbouring channels with one scale in one part of the bytes. LANES and CHANNELS are RUN and D, or
    the next powers of two, whose last lanes hold zeros."""
    WIDTH: tl.constexpr = D * BITS // 8  # bytes of a token's codes
    head, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    keys, values = keys + head * code_stride, values + head * code_stride
    key_scales, value_scales = key_scales + head * scale_stride, value_scales + head * scale_stride
    allowed += (head // kv_heads * allowed_heads + head % kv_heads % allowed_heads) * allowed_stride
    row, lane, channel = tl.arange(0, ROWS), tl.arange(0, LANES), tl.arange(0, CHANNELS)
    asked, written = (row < SHARE)[:, None], (row < SHARE)[:, None]
    if LANES != RUN:
        asked = asked & (lane < RUN)[None, :]
    if CHANNELS != D:
        written = written & (channel < D)[None, :]
    query += head * SHARE * D + row[:, None] * D

    most = tl.full([ROWS], NOTHING, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    end = min(count, (part + 1) * split)
    for start in range(part * split, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = token < end
        held, held_v = real[:, None], real[:, None]
        if LANES != RUN:
            held = held & (lane < RUN)[None, :]
        if CHANNELS != D:
            held_v = held_v & (channel < D)[None, :]
        # q . K: one product per run of channels, the scale applied to its sum
        scores = tl.zeros([ROWS, BLOCK], tl.float32)
        for run in tl.static_range(D // RUN):
            q = tl.load(query + run * RUN + lane[None, :], mask=asked, other=0.0)
            code = tl.load(keys + token[:, None] * WIDTH + run * RUN % WIDTH + lane[None, :], mask=held)
            code = _numbers(code, run * RUN // WIDTH, BITS)
            if LANES != RUN:
                code = tl.where(held, code, 0.0)
            dot = tl.dot(q.to(DOT), tl.trans(code).to(DOT), input_precision="ieee")
            if SCALED:
                scale = tl.load(key_scales + token * (D // GROUP) + run * RUN // GROUP, mask=real, other=0.0)
                dot *= scale.to(tl.float32)[None, :]
            scores += dot
        seen = real
        if MASKED:
            seen = real & tl.load(allowed + token, mask=real, other=0).to(tl.int1)
        scores = tl.where(seen[None, :], scores * scaling, NOTHING)
        # online softmax: what was summed up so far shrinks when a larger score appears
        highest = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp(most - highest)
        p = tl.where(real[None, :], tl.exp(scores - highest[:, None]), 0.0)
        weight = weight * shrink + tl.sum(p, 1)
        most = highest
        # p . V: both parts of a byte in one tile, scaled in registers, as every token has scales of its own
        code = tl.load(values + token[:, None] * WIDTH + channel[None, :] % WIDTH, mask=held_v)
        v = _numbers(code, (channel // WIDTH)[None, :], BITS)
        if SCALED:
            at = token[:, None] * (D // GROUP) + channel[None, :] // GROUP
            v *= tl.load(value_scales + at, mask=held_v, other=0.0).to(tl.float32)
        v = tl.where(held_v, v, 0.0)
        summed = tl.dot(p.to(DOT), v.to(DOT), input_precision="ieee")
        total = total * shrink[:, None] + summed

    mine = (head * tl.num_programs(1) + part) * SHARE + row
    tl.store(sums + mine[:, None] * D + channel[None, :], total, mask=written)
    tl.store(weights + mine, weight, mask=row < SHARE)
    tl.store(largest + mine, most, mask=row < SHARE)


@triton.jit(do_not_specialize=["splits"])
def _merge(
    sums, weights, largest, out, splits,
    SHARE: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The splits of one query head: sums `[KV heads of all rows, splits, SHARE, D]` -> out `[heads, D]`."""
    head, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    first = head // SHARE * splits * SHARE + head % SHARE
    every = tl.arange(0, SPLITS)
    most = tl.max(tl.load(largest + first + every * SHARE, mask=every < splits, other=NOTHING), 0)
    total, weight = tl.zeros([CHANNELS], tl.float32), 0.0
    for start in range(0, splits, CHUNK):
        part = start + tl.arange(0, CHUNK)
        at, real = first + part * SHARE, part < splits
        factor = tl.where(real, tl.exp(tl.load(largest + at, mask=real, other=NOTHING) - most), 0.0)
        there = real[:, None]
        if CHANNELS != D:
            there = there & (channel < D)[None, :]
        parts = tl.load(sums + at[:, None] * D + channel[None, :], mask=there, other=0.0)
        total += tl.sum(factor[:, None] * parts, 0)
        weight += tl.sum(factor * tl.load(weights + at, mask=real, other=0.0), 0)
    if CHANNELS != D:
        tl.store(out + head * D + channel, total / weight, mask=channel < D)
    else:
        tl.store(out + head * D + channel, total / weight)


def supports(form, head_dim: int) -> bool:
    """Whether these kernels read a format: symmetric integers of 2, 4 or 8 bits, or 8-bit floats, whose
    scales, if any, belong to single tokens; head dimensions are multiples of 16, and 16 neighbouring channels
    at least have one scale and lie in one part of the bytes (see `_run`)."""
    if not isinstance(form, Int | Float8) or head_dim % 16 or head_dim > 256:
        return False
    scales, bits = form.scales, getattr(form, "bits", 8)
    if bits not in (2, 4, 8):
        return False
    if scales is None:
        return True
    group = scales.group or head_dim
    small = head_dim % group or _run(group, head_dim, bits) < 16
    return not (small or scales.fixed) and getattr(form, "symmetric", True)


def _run(group: int, head_dim: int, bits: int) -> int:
    """Neighbouring channels that share a scale and lie in one part of the bytes."""
    return math.gcd(group, head_dim * bits // 8)


def compiles(form, capability: tuple[int, int] | None) -> bool:
    """Whether a GPU of this compute capability (None: interpreted) knows the format's numbers: Triton has
    e4m3 from 8.9 on."""
    return capability is None or getattr(form, "format", None) != "e4m3" or capability >= (8, 9)


def attend(
    query: Tensor, keys, values, form, scaling: float, allowed=None, split: int | None = None
) -> Tensor:
    """Attention of one query per head over packed K and V.

    query `[batch, heads, 1, head_dim]`; keys, values: what `form.encode` returned; allowed bool `[batch, 1 or
    kv_heads, 1, tokens]` or None; split: tokens of a split (default: see `_splits`).
    Returns `[batch, heads, 1, head_dim]` in query's dtype.
    Raises ValueError for a format that `supports` refuses and for more than one query.
    """
    batch, heads, queries, head_dim = query.shape
    if queries != 1 or not supports(form, head_dim):
        raise ValueError(
            f"{type(form).__name__}: no kernel for {queries} queries of head dimension {head_dim}"
        )
    kv_heads, count = keys[0].shape[1:3]
    scaled = len(keys) > 1
    (codes, codes_v), (scales, scales_v) = _even(keys[0], values[0]), _even(keys[-1], values[-1])
    bits = 8 * codes.shape[-1] // head_dim
    if isinstance(form, Float8):
        codes, codes_v = (part.view(form.TYPES[form.format]) for part in (codes, codes_v))
    block = BLOCKS.get(query.dtype, BLOCK)
    if split is None:
        parts = _splits(_programs(query), batch * kv_heads, -(-count // (LEAST * block)))
        split = -(-count // (parts * block)) * block
    splits = -(-count // split)
    share = heads // kv_heads
    query = query.contiguous()
    new = {"device": query.device, "dtype": torch.float32}
    sums = torch.empty(batch * kv_heads, splits, share, head_dim, **new)
    # One by one, so that each begins where memory is aligned: else a kernel is compiled for every alignment.
    weights, largest = (torch.empty(batch * kv_heads, splits, share, **new) for _ in "wl")
    group = head_dim // scales.shape[-1] if scaled else head_dim
    run, channels = _run(group, head_dim, bits), triton.next_power_of_2(head_dim)
    mask = query if allowed is None else allowed.expand(batch, -1, -1, -1).contiguous().view(torch.uint8)
    _attend_split[(batch * kv_heads, splits)](
        query, codes, scales, codes_v, scales_v, mask, sums, weights, largest,
        count, split, scaling, codes.stride(1), scales.stride(1), kv_heads, count, mask.shape[1],
        BITS=bits, D=head_dim, GROUP=group, SCALED=scaled, MASKED=allowed is not None, SHARE=share,
        ROWS=max(ROWS, triton.next_power_of_2(share)), BLOCK=block,
        DOT=tl.float32 if INTERPRETED else TYPES[query.dtype],
        RUN=run, LANES=triton.next_power_of_2(run), CHANNELS=channels,
    )  # fmt: skip
    out = torch.empty_like(query, dtype=torch.float32 if INTERPRETED else query.dtype)
    _merge[(batch * heads,)](
        sums, weights, largest, out, splits,
        SHARE=share, D=head_dim, SPLITS=triton.next_power_of_2(splits), CHUNK=CHUNK, CHANNELS=channels,
    )  # fmt: skip
    return out.to(query.dtype)


def _even(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """K and V with the same strides: tokens one after the other, (row, head) pairs equally far apart."""
    even = all(
        part.stride(3) == 1
        and part.stride(2) == part.shape[3]
        and part.stride(0) == part.shape[1] * part.stride(1)
        for part in (keys, values)
    )
    same = keys.stride() == values.stride()
    return (keys, values) if even and same else (keys.contiguous(), values.contiguous())


def _programs(query: Tensor) -> int:
    """Programs that a GPU runs at the same time, as far as registers go: on sm_90 one with heads of 128 takes
    up to 168 registers a thread, with heads of 256 all there are."""
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count if query.is_cuda else 1
    return processors * (3 if query.shape[3] <= 128 else 2)


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
