"""One new token of every row, written into buffers on a GPU as its format writes it, in one launch.

The reference is the format's `encode`, to the bit. The token's slot is read on the device, and a number that
cannot be stored is flagged there, without waiting.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gpu_numbers import INTERPRETED, kind_of, supports

ROUND = tl.constexpr(1.5 * 2**23)  # added and taken away, it leaves whole numbers: half to even
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}


@triton.jit
def _float8(x, FRACTION: tl.constexpr, BIAS: tl.constexpr):
    """fp32 within the range of an 8-bit float -> its bits."""
    CUT: tl.constexpr = 23 - FRACTION
    whole = x.to(tl.int32, bitcast=True)
    bits = whole & 0x7FFFFFFF
    normal = ((bits + (1 << (CUT - 1)) - 1 + ((bits >> CUT) & 1)) >> CUT) - ((127 - BIAS) << FRACTION)
    small = (tl.abs(x) * 2.0 ** (BIAS - 1 + FRACTION) + ROUND) - ROUND  # in steps of the smallest number
    return ((whole >> 24) & 128) | tl.where(tl.abs(x) < 2.0 ** (1 - BIAS), small.to(tl.int32), normal)


@triton.jit
def _write(
    new, codes, scales, bad, largest, inverse,
    FORM: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, EXACTLY: tl.constexpr,
    LANES: tl.constexpr, SPREAD: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """One vector `[D]` into its place. LANES, SPREAD and MEMBERS are the width of the codes, GROUPS and the
    channels of a group, or the next powers of two. EXACTLY: torch divides by a number, as on a CPU; on a GPU
    it multiplies by the `inverse`."""
    WIDTH: tl.constexpr = D * BITS // 8 if BITS < 16 else D
    GROUP: tl.constexpr = D // GROUPS
    lane, group, member = tl.arange(0, LANES), tl.arange(0, SPREAD), tl.arange(0, MEMBERS)
    there = (group < GROUPS)[:, None] & (member < GROUP)[None, :]
    size = tl.abs(
        tl.load(new + group[:, None] * GROUP + member[None, :], mask=there, other=0.0).to(tl.float32)
    )
    if FORM == "exact":
        x = tl.load(new + lane, mask=lane < D, other=0.0)
        tl.store(codes + lane, x.to(codes.dtype.element_ty), mask=lane < D)
    else:
        worst = tl.max(tl.max((~(size <= largest)).to(tl.int32), 1), 0)  # NaN is not
        tl.store(bad, 1, mask=worst > 0)
    if FORM == "e4m3":
        x = tl.load(new + lane, mask=lane < D, other=0.0).to(tl.float32)
        tl.store(codes + lane, _float8(x, 3, 7).to(tl.uint8), mask=lane < D)
    elif FORM == "e5m2":
        x = tl.load(new + lane, mask=lane < D, other=0.0).to(tl.float32)
        tl.store(codes + lane, _float8(x, 2, 15).to(tl.uint8), mask=lane < D)
    elif FORM != "exact":
        wanted = tl.max(size, 1)
        if EXACTLY:
            wanted = tl.div_rn(wanted, tl.full([SPREAD], 2 ** (BITS - 1) - 1, tl.float32))
        else:
            wanted = wanted * inverse
        half = wanted.to(tl.float16)  # rounded up
        above = (half.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
        scale = tl.where(half.to(tl.float32) < wanted, above, half)
        tl.store(scales + group, scale, mask=group < GROUPS)
        step = tl.maximum(scale.to(tl.float32), 2.0**-24)[None, :]
        byte = tl.zeros([LANES], tl.int32)
        for place in tl.static_range(8 // BITS):
            channel = place * WIDTH + lane
            x = tl.load(new + channel, mask=lane < WIDTH, other=0.0).to(tl.float32)
            mine = tl.sum(tl.where((channel // GROUP)[:, None] == group[None, :], step, 0.0), 1)
            code = (tl.div_rn(x, tl.where(lane < WIDTH, mine, 1.0)) + ROUND) - ROUND
            if BITS < 8:
                byte |= (code.to(tl.int32) + 2 ** (BITS - 1)) << (place * BITS)
            else:
                byte = code.to(tl.int32)
        tl.store(codes + lane, byte.to(codes.dtype.element_ty), mask=lane < WIDTH)


@triton.jit
def _append(
    new_k, new_v, keys, values, key_scales, value_scales, slot, bad, largest, inverse,
    kv_heads, k_row, k_head, v_row, v_head, code_row, code_head, scale_row, scale_head,
    FORM: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr, EXACTLY: tl.constexpr,
    LANES: tl.constexpr, SPREAD: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """K or V of one (row, KV head)."""
    WIDTH: tl.constexpr = D * BITS // 8 if BITS < 16 else D
    row, head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    at = tl.load(slot).to(tl.int64)
    code = row.to(tl.int64) * code_row + head * code_head + at * WIDTH
    scale = row.to(tl.int64) * scale_row + head * scale_head + at * GROUPS
    if tl.program_id(1) == 0:
        _write(new_k + row * k_row + head * k_head, keys + code, key_scales + scale, bad, largest, inverse,
               FORM, D, BITS, GROUPS, EXACTLY, LANES, SPREAD, MEMBERS)  # fmt: skip
    else:
        _write(new_v + row * v_row + head * v_head, values + code, value_scales + scale, bad, largest,
               inverse, FORM, D, BITS, GROUPS, EXACTLY, LANES, SPREAD, MEMBERS)  # fmt: skip


def appends(form) -> bool:
    """Whether `append` writes a format: plain numbers, symmetric integers with fp16 scales, 8-bit floats
    without; all refuse what they cannot hold."""
    kind, scales = kind_of(form), getattr(form, "scales", None)
    if kind is None or getattr(form, "nonfinite", "refuse") != "refuse":
        return False
    if scales is None:
        return True
    return kind.startswith("int") and form.symmetric and not scales.fixed and scales.dtype == torch.float16


def append(
    keys_parts, values_parts, keys: Tensor, values: Tensor, form, slot: Tensor, bad: Tensor | None = None
) -> Tensor:
    """Write one new token of every row into buffers, to the bit as `form.encode` does.

    keys_parts, values_parts: what `form.encode` makes, as buffers `[batch, kv_heads, capacity, width]`; keys,
    values `[batch, kv_heads, 1, head_dim]`; slot: int32 `[1]` on the device. Returns bool `[1]` there,
    true if something cannot be stored; the slot's content is then undefined. bad: such a tensor to reuse,
    which stays true if it was; a new one costs another launch.
    Raises ValueError for a format that `appends` refuses and for K and V in buffers of other strides.
    """
    batch, kv_heads, tokens, head_dim = keys.shape
    if tokens != 1 or not (appends(form) and supports(form, head_dim)):
        name = type(form).__name__
        raise ValueError(f"{name}: no kernel appends {tokens} tokens of head dimension {head_dim}")
    pairs = list(zip(keys_parts, values_parts, strict=True))
    if any(k.stride() != v.stride() or k.stride(2) != k.shape[3] for k, v in pairs):
        raise ValueError("append: K and V need buffers of the same strides, one token after the other")
    if bad is None:
        bad = torch.zeros(1, dtype=torch.bool, device=keys.device)
    kind, (codes, codes_v), (scales, scales_v) = kind_of(form), pairs[0], pairs[-1]
    groups = scales.shape[3] if len(pairs) > 1 else 1
    bits = 16 if kind == "exact" else 8 * codes.shape[3] // head_dim
    most = 2 ** (bits - 1) - 1  # code
    _append[(batch * kv_heads, 2)](
        keys, values, codes, codes_v, scales, scales_v, slot, bad.view(torch.uint8),
        LARGEST.get(kind, 65504.0 * most), 1 / most,
        kv_heads, *keys.stride()[:2], *values.stride()[:2], *codes.stride()[:2], *scales.stride()[:2],
        FORM=kind, D=head_dim, BITS=bits, GROUPS=groups, EXACTLY=INTERPRETED,
        LANES=triton.next_power_of_2(codes.shape[3]), SPREAD=triton.next_power_of_2(groups),
        MEMBERS=triton.next_power_of_2(head_dim // groups),
    )  # fmt: skip
    return bad
