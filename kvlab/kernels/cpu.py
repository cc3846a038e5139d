"""Decode attention over packed K and V on a CPU, compiled by numba (its wheels bring the compiler along).

Flash-decoding (Dao et al. 2023): every (row, KV head) is cut into splits of `SPLIT` tokens, each split runs
through its K and V once with an online softmax, and the splits are merged at the end. Codes are turned into
numbers in registers, so memory traffic is that of the packed bytes: a quarter of fp32 for int8, an eighth for
int4. A group's scale is applied after its dot product.

Codes `[batch, kv_heads, capacity, width]` and fp16 scales (as uint16) `[batch, kv_heads, capacity, groups]`
may be longer than the `count` tokens in use. The layouts are those of `store/int.py`.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
from numba import njit

INT8, INT4, E4M3, E5M2 = range(4)  # kinds of codes
BLOCK = 128  # tokens whose scores are held at a time
SPLIT = 4096  # tokens of a split, a multiple of BLOCK; fixed, so that results do not depend on threads
FLOOR = np.float32(-1e30)
LANES, SIDES = 16, 8  # of K: codes of a piece where they divide it, pieces side by side at most
FAST = {
    "reassoc",
    "contract",
    "nsz",
    "arcp",
}  # without nnan and ninf, which take NaN and infinity for impossible


# Small floats are widened by moving their bits and adding to the exponent. A multiplication would be shorter,
# but fast math moves its factor out of the sum, where it overflows.


@njit(fastmath=FAST)
def _half(bits):
    """The fp16 number, finite and not negative, whose bits are `bits` (uint16), as fp32."""
    bits = np.int32(bits)
    if bits < 1024:  # subnormal
        return np.float32(bits) * np.float32(2.0**-24)
    return np.int32((bits << 13) + (112 << 23)).view(np.float32)


@njit(inline="always", fastmath=FAST)
def _value(kind, code):
    """The number that a code stands for, without its scale; of an int4 byte: that of its lower half."""
    if kind == INT8:
        return np.float32(code)
    if kind == INT4:  # numba widens what it adds to 64 bits; cut back at once, 16 of them fit a register
        return np.float32(np.int32(np.int32(np.int32(code) & 15) - 8))
    bits = np.int32(code)
    if kind == E4M3:
        normal = np.int32(((bits & 127) << 20) + (120 << 23)).view(np.float32)
        size = normal if bits & 120 else np.float32(np.int32(bits & 7)) * np.float32(2.0**-9)
    else:
        normal = np.int32(((bits & 127) << 21) + (112 << 23)).view(np.float32)
        size = normal if bits & 124 else np.float32(np.int32(bits & 3)) * np.float32(2.0**-16)
    return -size if bits & 128 else size


@njit(inline="always", fastmath=FAST)
def _upper(code):
    """The number that the upper half of an int4 byte stands for."""
    return np.float32(np.int32(np.int32(np.int32(code) >> 4) - 8))


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
def _scale(kind, head_dim, group, scales, channel):
    """What a channel's code is multiplied by within a sum; a scale of the whole vector waits for its end."""
    return _half(scales[channel // group]) if kind < E4M3 and group < head_dim else np.float32(1.0)


@njit(inline="always", fastmath=FAST)
def _dot(kind, head_dim, group, piece, sides, q, code, scales):
    """Query times one token's K.

    The innermost loop is unrolled: `sides` pieces of codes, and both halves of int4's, are added up side by
    side, so that a byte is loaded once and the lanes of a register are added up once.
    """
    width = head_dim // 2 if kind == INT4 else head_dim
    score = np.float32(0.0)
    for start in range(0, width, sides * piece):
        for j in range(piece):
            for side in range(sides):
                c = start + side * piece
                byte = code[c + j]
                score += _scale(kind, head_dim, group, scales, c) * (q[c + j] * _value(kind, byte))
                if kind == INT4:
                    u = width + c
                    score += _scale(kind, head_dim, group, scales, u) * (q[u + j] * _upper(byte))
    return score * _half(scales[0]) if kind < E4M3 and group == head_dim else score


@njit(inline="always", fastmath=FAST)
def _weight(kind, group, weight, scales, channel):
    """A token's weight times its scale for a channel."""
    return weight * _half(scales[channel // group]) if kind < E4M3 else weight


@njit(inline="always", fastmath=FAST)
def _add(kind, head_dim, group, piece, total, weights, codes, scales, at, last):
    """Add the V of four tokens, each times its weight, to `total`, which so is loaded and stored once.

    weights: of token `at` and the next three; 0 for those beyond `last`, which is read in their place.
    """
    width = head_dim // 2 if kind == INT4 else head_dim
    t1, t2, t3 = min(at + 1, last), min(at + 2, last), min(at + 3, last)
    a, b, c, d = codes[at], codes[t1], codes[t2], codes[t3]
    for start in range(0, width, piece):
        wa = _weight(kind, group, weights[0], scales[at], start)
        wb = _weight(kind, group, weights[1], scales[t1], start)
        wc = _weight(kind, group, weights[2], scales[t2], start)
        wd = _weight(kind, group, weights[3], scales[t3], start)
        if kind == INT4:
            xa = _weight(kind, group, weights[0], scales[at], width + start)
            xb = _weight(kind, group, weights[1], scales[t1], width + start)
            xc = _weight(kind, group, weights[2], scales[t2], width + start)
            xd = _weight(kind, group, weights[3], scales[t3], width + start)
        for j in range(start, start + piece):
            total[j] += wa * _value(kind, a[j]) + wb * _value(kind, b[j])
            total[j] += wc * _value(kind, c[j]) + wd * _value(kind, d[j])
            if kind == INT4:
                total[width + j] += xa * _upper(a[j]) + xb * _upper(b[j])
                total[width + j] += xc * _upper(c[j]) + xd * _upper(d[j])


def pieces(kind: int, head_dim: int, group: int) -> tuple[int, int, int]:
    """How a token's codes are worked through: (piece of V, piece of K, how many pieces of K side by side).

    A piece is so many codes in a row that share a scale, with int4 in the lower and in the upper half of
    their bytes: where three groups fill two halves, half a group. Pieces divide the codes without a rest.
    """
    width = head_dim // 2 if kind == INT4 else head_dim
    piece = gcd(group, width)
    short = gcd(piece, LANES)
    while width // short > SIDES and piece % (2 * short) == 0:
        short *= 2
    return piece, short, max(n for n in range(1, SIDES + 1) if width // short % n == 0)


@cache
def compiled(kind: int, head_dim: int, group: int):
    """The kernel for one kind of code, head dimension and group size; compiled once, kept on disk.

    kernel(query `[batch, heads, head_dim]` fp32 and already scaled, keys, key_scales, values, value_scales,
    allowed bool `[batch, 1 or kv_heads, count]` (or empty: all), count, first, last, parts): works through
    splits first..last-1 and writes each one's `[group of heads, head_dim + 2]` (weighted sum of V, sum of
    weights, largest score) into parts `[splits, heads per KV head, head_dim + 2]`.
    """

    piece, short, sides = pieces(kind, head_dim, group)

    @njit(nogil=True, fastmath=FAST, cache=True)
    def kernel(query, keys, key_scales, values, value_scales, allowed, count, first, last, parts):
        kv_heads = keys.shape[1]
        share = query.shape[1] // kv_heads
        splits = (count + SPLIT - 1) // SPLIT
        scores = np.empty(BLOCK + 3, np.float32)
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
                    highest = most
                    for t in range(size):
                        score = _dot(kind, head_dim, group, short, sides, q, k[at + t], ks[at + t])
                        if allowed.shape[2] and not allowed[b, masked, at + t]:
                            score = FLOOR
                        scores[t] = score
                        highest = max(highest, score)
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
                    scores[size : size + 3] = 0.0
                    for t in range(0, size, 4):
                        four = scores[t : t + 4]
                        _add(kind, head_dim, group, piece, total, four, v, vs, at + t, end - 1)
                parts[item, s, :head_dim] = total
                parts[item, s, head_dim] = weight
                parts[item, s, head_dim + 1] = most

    return kernel
