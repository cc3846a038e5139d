"""Decode attention over packed K and V on a CPU, compiled by numba (its wheels bring the compiler along).

Flash-decoding (Dao et al. 2023): every (row, KV head) is cut into splits of `SPLIT` tokens, each split runs
through its K and V once with an online softmax, and the splits are merged at the end. Codes are turned into
numbers in registers, so memory traffic is that of the packed bytes: a quarter of fp32 for int8, an eighth for
int4. A group's scale is applied after its dot product.

Codes `[batch, kv_heads, capacity, width]` and fp16 scales (as uint16) `[batch, kv_heads, capacity, groups]`
may be longer than the `count` tokens in use. The layouts are those of `store/format.py`.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

INT8, INT4, E4M3, E5M2 = range(4)  # kinds of codes
BLOCK = 128  # tokens whose scores are held at a time
SPLIT = 4096  # tokens of a split, a multiple of BLOCK; fixed, so that results do not depend on threads
FLOOR = np.float32(-1e30)


# Small floats are widened by moving their bits and adding to the exponent. A multiplication would be shorter,
# but fast math moves its factor out of the sum, where it overflows.


@njit(fastmath=True)
def _half(bits):
    """The fp16 number, not negative, whose bits are `bits` (uint16), as fp32."""
    bits = np.int32(bits)
    if bits < 1024:  # subnormal
        return np.float32(bits) * np.float32(2.0**-24)
    return np.int32((bits << 13) + (112 << 23)).view(np.float32)


@njit(inline="always", fastmath=True)
def _value(kind, code, high):
    """The number that a code stands for, without its scale; `high`: of an int4 byte, the upper half."""
    if kind == INT8:
        return np.float32(code)
    if kind == INT4:
        nibble = np.int32(code) >> 4 if high else np.int32(code) & 15
        return np.float32(np.int32(nibble - 8))
    bits = np.int32(code)
    if kind == E4M3:
        normal = np.int32(((bits & 127) << 20) + (120 << 23)).view(np.float32)
        size = normal if bits & 120 else np.float32(np.int32(bits & 7)) * np.float32(2.0**-9)
    else:
        normal = np.int32(((bits & 127) << 21) + (112 << 23)).view(np.float32)
        size = normal if bits & 124 else np.float32(np.int32(bits & 3)) * np.float32(2.0**-16)
    return -size if bits & 128 else size


@njit(fastmath=True)
def _exp(x):
    """e^x for x <= 0, to 2e-7 relative: 2^(whole part) by the exponent bits, 2^(rest) by a polynomial."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-126.0))
    whole = np.floor(t)
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


@njit(inline="always", fastmath=True)
def _scale(kind, scales, group):
    return np.float32(1.0) if kind >= E4M3 else _half(scales[group])


@njit(inline="always", fastmath=True)
def _dot(kind, group, piece, quads, q, code, scales, high):
    """Query times one token's K, or its half. Four pieces that share a scale are summed side by side."""
    score, start = np.float32(0.0), 4 * piece * quads if high else 0
    for quad in range(quads):
        c0 = quad * 4 * piece
        c1, c2, c3 = c0 + piece, c0 + 2 * piece, c0 + 3 * piece
        q0, q1, q2, q3 = start + c0, start + c1, start + c2, start + c3
        d0 = d1 = d2 = d3 = np.float32(0.0)
        for j in range(piece):
            d0 += q[q0 + j] * _value(kind, code[c0 + j], high)
            d1 += q[q1 + j] * _value(kind, code[c1 + j], high)
            d2 += q[q2 + j] * _value(kind, code[c2 + j], high)
            d3 += q[q3 + j] * _value(kind, code[c3 + j], high)
        score += d0 * _scale(kind, scales, q0 // group) + d1 * _scale(kind, scales, q1 // group)
        score += d2 * _scale(kind, scales, q2 // group) + d3 * _scale(kind, scales, q3 // group)
    return score


@njit(inline="always", fastmath=True)
def _add(kind, group, piece, quads, total, weight, code, scales, high):
    """Add one token's V, or its half, times its weight, to `total`."""
    start = 4 * piece * quads if high else 0
    for quad in range(quads):
        c0 = quad * 4 * piece
        c1, c2, c3 = c0 + piece, c0 + 2 * piece, c0 + 3 * piece
        t0, t1, t2, t3 = start + c0, start + c1, start + c2, start + c3
        w0, w1 = weight * _scale(kind, scales, t0 // group), weight * _scale(kind, scales, t1 // group)
        w2, w3 = weight * _scale(kind, scales, t2 // group), weight * _scale(kind, scales, t3 // group)
        for j in range(piece):
            total[t0 + j] += w0 * _value(kind, code[c0 + j], high)
            total[t1 + j] += w1 * _value(kind, code[c1 + j], high)
            total[t2 + j] += w2 * _value(kind, code[c2 + j], high)
            total[t3 + j] += w3 * _value(kind, code[c3 + j], high)


@cache
def compiled(kind: int, head_dim: int, group: int):
    """The kernel for one kind of code, head dimension and group size; compiled once, kept on disk.

    kernel(query `[batch, heads, head_dim]` fp32 and already scaled, keys, key_scales, values, value_scales,
    allowed bool `[batch, 1 or kv_heads, count]` (or empty: all), count, first, last, parts): works through
    splits first..last-1 and writes each one's `[group of heads, head_dim + 2]` (weighted sum of V, sum of
    weights, largest score) into parts `[splits, heads per KV head, head_dim + 2]`.
    """
    width = head_dim // 2 if kind == INT4 else head_dim
    piece = min(group, width // 4)  # codes that share a scale
    quads = width // (4 * piece)

    @njit(nogil=True, fastmath=True, cache=True)
    def kernel(query, keys, key_scales, values, value_scales, allowed, count, first, last, parts):
        kv_heads = keys.shape[1]
        share = query.shape[1] // kv_heads
        splits = (count + SPLIT - 1) // SPLIT
        scores = np.empty(BLOCK, np.float32)
        total = np.empty(head_dim, np.float32)
        for item in range(first, last):
            b, h = item // (kv_heads * splits), item // splits % kv_heads
            start = item % splits * SPLIT
            end = min(start + SPLIT, count)
            masked = h if allowed.shape[1] > 1 else 0
            k, ks, v, vs = keys[b, h], key_scales[b, h], values[b, h], value_scales[b, h]
            for s in range(share):
                q = query[b, h * share + s]
                total[:] = 0.0
                weight, most = np.float32(0.0), FLOOR
                for at in range(start, end, BLOCK):
                    size = min(BLOCK, end - at)
                    for t in range(size):
                        score = _dot(kind, group, piece, quads, q, k[at + t], ks[at + t], False)
                        if kind == INT4:
                            score += _dot(kind, group, piece, quads, q, k[at + t], ks[at + t], True)
                        scores[t] = score
                    if allowed.shape[2]:
                        for t in range(size):
                            if not allowed[b, masked, at + t]:
                                scores[t] = FLOOR
                    highest = most
                    for t in range(size):
                        highest = max(highest, scores[t])
                    if highest > most:
                        shrink = _exp(most - highest)
                        weight *= shrink
                        for j in range(head_dim):
                            total[j] *= shrink
                        most = highest
                    for t in range(size):
                        scores[t] = _exp(scores[t] - most)
                    for t in range(size):
                        weight += scores[t]
                    for t in range(size):
                        _add(kind, group, piece, quads, total, scores[t], v[at + t], vs[at + t], False)
                        if kind == INT4:
                            _add(kind, group, piece, quads, total, scores[t], v[at + t], vs[at + t], True)
                parts[item, s, :head_dim] = total
                parts[item, s, head_dim] = weight
                parts[item, s, head_dim + 1] = most

    return kernel
