"""A decode step's attention on a CPU, compiled by numba: writes the new token, then attends to what is held.

Flash-decoding (Dao et al. 2023): every (row, KV head) is cut into splits of `SPLIT` tokens, each split runs
through its K and V once with an online softmax, and the splits are merged at the end. Codes are turned into
numbers in registers (`lanes.py`), so memory traffic is that of the packed bytes: a quarter of fp32 for int8,
an eighth for int4. Where several query heads share a KV head, up to `HEADS` of them are worked at together,
so a code is read once for all of them. Where a keep observes, scores are noted besides; they become the
weights that tokens received when the largest score and the sum of weights are known.

Codes `[batch, kv_heads, capacity, width]` and fp16 scales (as uint16) `[batch, kv_heads, capacity, groups]`
may be longer than the `count` tokens in use. The layouts, and the bits that are written, are those of
`store/exact.py`, `int.py` and `float8.py`.
"""

# Compiled into this: fast/lanes.py d5a701e7

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit
from numba.extending import register_jitable

from .lanes import E4M3, F32, FAST, INT4, INT8, LANES, UNIT, add_up, dots, largest

BLOCK = 1024  # tokens whose scores are held at a time: a block has costs of its own
SPLIT = 4096  # tokens of a split, a multiple of it; fixed, so that results do not depend on threads
FLOOR = np.float32(-1e30)
LEAST = np.float32(-87.0)  # e to this is the least that `_exp` can tell from nothing
FAINT = np.float32(-64.0)  # e to this is nothing beside 1, and what is much smaller is slow to multiply
HEADS = 4  # query heads of a group that are worked at at a time, at most


@njit(fastmath=FAST)
def _exp(x):
    """e^x for x <= 0, to 2e-7 relative: 2^(whole part) by the exponent bits, 2^(rest) by a polynomial."""
    low = np.float32(-126.0)
    t = max(x * np.float32(1.4426950408889634), low)
    whole = np.floor(max(low, t))  # in this order: t may be NaN, its whole part may not
    f = (t - whole) * np.float32(0.6931471805599453)
    p = np.float32(1 / 5040)
    p = p * f + np.float32(1 / 720)
    p = p * f + np.float32(1 / 120)
    p = p * f + np.float32(1 / 24)
    p = p * f + np.float32(1 / 6)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@njit(inline="always", fastmath=FAST)
def _faint(x):
    """e^x for x <= 0; 0 where that is nothing beside 1, as where a token is masked. Times V it would become a
    number without a leading 1 (subnormal), and a processor takes a hundred times longer for each of these."""
    return np.float32(0.0) if x < FAINT else _exp(x)


# Small floats are widened by moving their bits and adding to the exponent. A multiplication would be shorter,
# but fast math moves its factor out of the sum, where it overflows.


@njit(fastmath=FAST)
def _half(bits):
    """The fp16 number, finite and not negative, whose bits are `bits` (uint16), as fp32."""
    bits = np.int32(bits)
    if bits < 1024:  # subnormal
        return np.float32(bits) * np.float32(2.0**-24)
    return np.int32((bits << 13) + (112 << 23)).view(np.float32)


@njit(fastmath=FAST)
def _widened(scales, at, size, steps):
    """The scales `[tokens, groups]`, as bits of fp16, of `size` tokens from `at` on, into steps `[tokens,
    groups]` as fp32."""
    groups = scales.shape[1]
    flat, found = scales.reshape(-1)[at * groups : (at + size) * groups], steps.reshape(-1)
    for i in range(flat.shape[0]):
        found[i] = _half(flat[i])


# What is written has the bits that the formats write (`tests/fast/test_fused.py` compares), so none of
# these functions is compiled with fast math; unless told so, they would inherit it from the kernel.


@njit(fastmath=False)
def _round_up(x):
    """The bits of the smallest fp16 number that is not below x, fp32 from 0 to 65504."""
    if x < np.float32(2.0**-14):  # subnormal
        return np.uint16(np.ceil(x * np.float32(2.0**24)))
    bits = np.int64(np.float32(x).view(np.int32))
    return np.uint16(((bits + 0x1FFF) >> 13) - (112 << 10))


@njit(fastmath=False)
def _eight(kind, x):
    """The bits of the 8-bit float nearest to x, fp32 and finite; ties go to even, what is too large to the
    largest."""
    if kind == E4M3:
        bias, shift, largest = 7, 20, 0x43E00000  # 448
    else:
        bias, shift, largest = 15, 21, 0x47600000  # 57344
    bits = np.int64(np.float32(x).view(np.int32))
    size = min(bits & 0x7FFFFFFF, largest)
    if size < (128 - bias) << 23:  # subnormal: fp32 rounds, next to a number whose last bit is theirs
        near = np.int32((127 - bias + shift + 1) << 23).view(np.float32)
        moved = np.float32(np.int32(size).view(np.float32) + near)
        code = np.int64(moved.view(np.int32)) - ((128 - bias + shift) << 23)
    else:
        code = (size - ((127 - bias) << 23) + (1 << (shift - 1)) - 1 + ((size >> shift) & 1)) >> shift
    return np.uint8(code | ((bits >> 24) & 128))


@njit(fastmath=False)
def _write(kind, group, x, codes, scales, whole):
    """One token's K or V `[head_dim]` in its stored form; False for a value that the format refuses. whole
    `[head_dim]`: room for codes that are not packed yet."""
    head_dim = x.shape[0]
    if kind >= F32:
        codes[:] = x
        return True
    if kind >= E4M3:
        most = np.float32(448.0) if kind == E4M3 else np.float32(57344.0)
        for j in range(head_dim):
            if not abs(x[j]) <= most:
                return False
            codes[j] = _eight(kind, x[j])
        return True
    qmax = np.float32(127.0) if kind == INT8 else np.float32(7.0)
    for g in range(head_dim // group):
        most = np.float32(0.0)
        for j in range(g * group, (g + 1) * group):
            size = np.float32(abs(x[j]))
            if not size <= np.float32(65504.0) * qmax:
                return False
            most = max(most, size)
        scales[g] = _round_up(most / qmax)
        step = max(_half(scales[g]), np.float32(2.0**-24))
        for j in range(g * group, (g + 1) * group):
            whole[j] = np.rint(np.float32(x[j]) / step)
    if kind == INT8:
        for j in range(head_dim):
            codes[j] = np.int8(whole[j])
    else:
        half = head_dim // 2
        for j in range(half):
            codes[j] = np.uint8(np.int32(whole[j]) + 8 | np.int32(whole[half + j]) + 8 << 4)
    return True


@njit(fastmath=FAST)
def _times(scores, share, size, factors):
    """Every head's scores, or weights, times the factors of their tokens."""
    for s in range(share):
        mine = scores[s]
        for t in range(size):
            mine[t] *= factors[t]


@njit(inline="always", fastmath=FAST)
def _soften(scores, s, size, total, weight, most):
    """A step of the online softmax of query head s: the first `size` of its scores become weights beside the
    largest score so far; total `[heads, channels]`, weight[s] and most[s] go along. Scores have room for a
    multiple of `LANES`."""
    whole = (size + LANES - 1) // LANES * LANES
    for t in range(size, whole):
        scores[s, t] = -np.inf
    highest = largest(scores, s, whole, most[s])
    if highest > most[s]:
        shrink = _faint(most[s] - highest)
        weight[s] *= shrink
        for j in range(total.shape[1]):
            total[s, j] *= shrink
        most[s] = highest
    for t in range(whole):
        scores[s, t] = _faint(scores[s, t] - highest)
    add = 0.0  # fp64: beside a token that holds nearly all, many small ones would be rounded off
    for t in range(whole):
        add += scores[s, t]
    weight[s] += add


@njit(nogil=True, fastmath=FAST, cache=True)
def merge(parts, out, scores, received):
    """Bring the splits of every head to one common largest score and add them up: parts `[heads of all rows,
    splits, heads per KV head, head_dim + 2]` -> out `[KV heads of all rows, heads per KV head, head_dim]`.

    scores `[KV heads of all rows, heads per KV head, count]` -> received `[KV heads of all rows, count]`: the
    softmax weight of every token, mean over the heads of its group; what no query may see, and what is below
    the smallest fp32, is 0. Empty ones: nobody asks.
    """
    heads, splits, share, width = parts.shape
    head_dim = width - 2
    for h in range(heads):
        for s in range(share):
            most = parts[h, 0, s, head_dim + 1]
            for i in range(1, splits):
                most = max(most, parts[h, i, s, head_dim + 1])
            weight = np.float32(0.0)
            out[h, s, :] = 0.0
            for i in range(splits):
                shrink = _faint(parts[h, i, s, head_dim + 1] - most) if splits > 1 else np.float32(1.0)
                weight += parts[h, i, s, head_dim] * shrink
                for j in range(head_dim):
                    out[h, s, j] += parts[h, i, s, j] * shrink
            for j in range(head_dim):
                out[h, s, j] /= weight
            share_of_one = np.float32(1.0) / (weight * np.float32(share))
            for t in range(received.shape[1]):
                x = scores[h, s, t] - most
                mine = np.float32(0.0) if x < LEAST else _exp(x) * share_of_one
                received[h, t] = mine if s == 0 else received[h, t] + mine


@register_jitable
def at_once(share: int) -> int:
    """How many of the `share` query heads of a KV head are worked at at a time: as many each time as fit."""
    return -(-share // -(-share // HEADS))


@cache
def compiled(kind: int, head_dim: int, group: int, heads: int):
    """The kernel for one kind of code, head dimension and group size, that works at so many of a KV head's
    query heads at a time (`at_once`); compiled once, kept on disk.

    kernel(query `[batch, heads, 1, head_dim]` fp32, scaling, new_keys and new_values `[batch, kv_heads, 1,
    head_dim]` (or empty: no token is new), keys, key_scales, values, value_scales, allowed bool `[batch, 1 or
    kv_heads, count]` (or empty: all), count, first, last, parts, out, noted, received): writes the new token
    into slot count - 1, works through splits first..last-1, and writes each one's `[group of heads,
    head_dim + 2]` (weighted sum of V, sum of weights, largest score) into parts `[splits, heads per KV head,
    head_dim + 2]`; where these are all splits, it merges them into out `[KV heads of all rows, heads per KV
    head, head_dim]`. noted and received: the scores of these splits, and what `merge` makes of them; empty
    where nobody asks what tokens received.
    Returns False, and has done nothing that counts, where the format refuses the new token. head_dim is a
    multiple of 2 * `LANES`, group of `LANES`.
    """
    coded = kind < E4M3
    grouped = group if coded and group < head_dim else 0  # or one scale for a token, which waits for the sum
    groups = head_dim // group if coded else 0
    width = head_dim // 2 if kind == INT4 else head_dim
    unit = np.float32(UNIT if kind == E4M3 else 1.0)

    @njit(nogil=True, fastmath=FAST, cache=True)
    def kernel(query, scaling, new_keys, new_values, keys, key_scales, values, value_scales, allowed, count,
               first, last, parts, out, noted, received):  # fmt: skip
        batch, kv_heads = keys.shape[:2]
        share, splits = query.shape[1] // kv_heads, (count + SPLIT - 1) // SPLIT
        rounded = (share + heads - 1) // heads * heads
        total, q = np.empty((rounded, head_dim), np.float32), np.empty((rounded, head_dim), np.float32)
        if new_keys.shape[2]:
            for b in range(batch):
                for h in range(kv_heads):
                    for side in range(2):
                        new = new_keys[b, h, 0] if side == 0 else new_values[b, h, 0]
                        codes = keys[b, h, count - 1] if side == 0 else values[b, h, count - 1]
                        scales = key_scales[b, h, count - 1] if side == 0 else value_scales[b, h, count - 1]
                        if not _write(kind, group, new, codes, scales, total[0]):
                            return False
        scores, steps = np.empty((rounded, BLOCK + LANES), np.float32), np.empty((BLOCK, groups), np.float32)
        factors = steps.reshape(-1)
        weight, most = np.empty(rounded, np.float32), np.empty(rounded, np.float32)
        q[:] = 0.0
        for item in range(first, last):
            b, h = item // (kv_heads * splits), item // splits % kv_heads
            start = item % splits * SPLIT
            end = min(start + SPLIT, count)
            masked = h if allowed.shape[1] > 1 else 0
            k, ks, v, vs = keys[b, h], key_scales[b, h], values[b, h], value_scales[b, h]
            for s in range(share):
                for j in range(head_dim):
                    q[s, j] = query[b, h * share + s, 0, j] * (scaling * unit)
                weight[s], most[s] = 0.0, FLOOR
            total[:] = 0.0
            for at in range(start, end, BLOCK):
                size = min(BLOCK, end - at)
                if groups:
                    _widened(ks, at, size, steps)
                some = k[at : at + size]
                for s in range(0, rounded, heads):
                    dots(kind, heads, grouped, width, q, s, some, steps, size, scores)
                if groups == 1:
                    _times(scores, share, size, factors)
                for s in range(share):
                    if allowed.shape[2]:
                        there = allowed[b, masked, at : at + size]
                        for t in range(size):
                            scores[s, t] = scores[s, t] if there[t] else FLOOR
                    if noted.shape[2]:
                        noted[b * kv_heads + h, s, at : at + size] = scores[s, :size]
                    _soften(scores, s, size, total, weight, most)
                if groups:
                    _widened(vs, at, size, steps)
                if groups == 1:
                    _times(scores, share, size, factors)
                some = v[at : at + size]
                for s in range(0, rounded, heads):
                    add_up(kind, heads, grouped, width, total, s, scores, some, steps, size)
            for s in range(share):
                for j in range(head_dim):
                    parts[item, s, j] = total[s, j] * unit
                parts[item, s, head_dim] = weight[s]
                parts[item, s, head_dim + 1] = most[s]
        if first == 0 and last == batch * kv_heads * splits:
            merge(parts.reshape(batch * kv_heads, splits, share, head_dim + 2), out, noted, received)
        return True

    return kernel
