"""A decode step's attention on a CPU, compiled by numba: writes the new token, then attends to what is held.

Flash-decoding (Dao et al. 2023): every (row, KV head) is cut into splits of `SPLIT` tokens, each split runs
through its K and V once with an online softmax, and the splits are merged at the end. Codes are turned into
numbers in registers, so memory traffic is that of the packed bytes: a quarter of fp32 for int8, an eighth for
int4. A group's scale is applied after its dot product. Where several query heads share a KV head, its codes
are widened once for all of them, a block at a time. Where a keep observes, scores are noted besides; they
become the weights that tokens received when the largest score and the sum of weights are known.

Codes `[batch, kv_heads, capacity, width]` and fp16 scales (as uint16) `[batch, kv_heads, capacity, groups]`
may be longer than the `count` tokens in use. The layouts, and the bits that are written, are those of
`store/exact.py`, `int.py` and `float8.py`.
"""

from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
from numba import njit

INT8, INT4, E4M3, E5M2, F32, BF16 = range(6)  # kinds of codes; bf16 as its bits
BLOCK = 128  # tokens whose scores are held at a time
SPLIT = 4096  # tokens of a split, a multiple of BLOCK; fixed, so that results do not depend on threads
FLOOR = np.float32(-1e30)
LEAST = np.float32(-87.0)  # e to this is the least that `_exp` can tell from nothing
FAINT = np.float32(-64.0)  # e to this is nothing beside 1, and what is much smaller is slow to multiply
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
    if kind in (INT8, F32):
        return np.float32(code)
    if kind == BF16:
        return np.int32(np.int32(code) << 16).view(np.float32)
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
def _faint(x):
    """e^x for x <= 0; 0 where that is nothing beside 1, as where a token is masked. Times V it would become a
    number without a leading 1 (subnormal), and a processor takes a hundred times longer for each of these."""
    return np.float32(0.0) if x < FAINT else _exp(x)


# What is written has the bits that the formats write (`tests/kernels/test_fused.py` compares), so none of
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
        for j in range(head_dim):
            if not abs(x[j]) < np.inf:
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
def _dots(kind, channels, q, codes, scales, at, last, scores, t):
    """Query times the K of four tokens, `at` and the next three, into scores t to t + 3; those beyond `last`
    get its own. For formats with one scale for a token's vector, or none.

    channels: head_dim, not known when this is compiled: a short loop of known length is unrolled before it
    could be vectorized, and then is not.
    """
    width = channels // 2 if kind == INT4 else channels
    t1, t2, t3 = min(at + 1, last), min(at + 2, last), min(at + 3, last)
    a, b, c, d = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
    for j in range(width):
        a += q[j] * _value(kind, codes[at, j])
        b += q[j] * _value(kind, codes[t1, j])
        c += q[j] * _value(kind, codes[t2, j])
        d += q[j] * _value(kind, codes[t3, j])
        if kind == INT4:
            a += q[width + j] * _upper(codes[at, j])
            b += q[width + j] * _upper(codes[t1, j])
            c += q[width + j] * _upper(codes[t2, j])
            d += q[width + j] * _upper(codes[t3, j])
    scores[t], scores[t + 1], scores[t + 2], scores[t + 3] = a, b, c, d
    if kind < E4M3:
        scores[t] *= _half(scales[at, 0])
        scores[t + 1] *= _half(scales[t1, 0])
        scores[t + 2] *= _half(scales[t2, 0])
        scores[t + 3] *= _half(scales[t3, 0])


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


@njit(fastmath=FAST)
def _widen(kind, group, codes, scales, at, size, rows):
    """The numbers of `size` tokens from `at` on, scales and all, into rows `[BLOCK, head_dim]`. No length is
    known when this is compiled: see `_dots`; a token took five to eight times as long when one was."""
    width = codes.shape[1]
    piece = min(group, width) if kind < E4M3 else width
    if width % piece:  # int4's halves begin within a group
        piece = group // 2
    for t in range(size):
        code, scale, row = codes[at + t], scales[at + t], rows[t]
        for start in range(0, width, piece):
            some, lower = code[start : start + piece], row[start : start + piece]
            by = _half(scale[start // group]) if kind < E4M3 else np.float32(1.0)
            for j in range(some.shape[0]):
                lower[j] = by * _value(kind, some[j])
            if kind == INT4:
                upper = row[width + start : width + start + piece]
                by = _half(scale[(width + start) // group])
                for j in range(some.shape[0]):
                    upper[j] = by * _upper(some[j])


@njit(inline="always", fastmath=FAST)
def _soften(scores, size, total, weight, most, s):
    """A step of the online softmax of query head s: the first `size` scores become weights beside the largest
    score so far, three zeros follow; total `[head_dim]`, weight[s] and most[s] go along."""
    highest = most[s]
    for t in range(size):
        highest = max(highest, scores[t])
    if highest > most[s]:
        shrink = _faint(most[s] - highest)
        weight[s] *= shrink
        for j in range(total.shape[0]):
            total[j] *= shrink
        most[s] = highest
    highest = most[s]
    for t in range(size):
        scores[t] = _faint(scores[t] - highest)
    add = np.float32(0.0)
    for t in range(size):
        add += scores[t]
    weight[s] += add
    scores[size : size + 3] = 0.0


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
def compiled(kind: int, head_dim: int, group: int, shared: bool):
    """The kernel for one kind of code, head dimension and group size, for one query head per KV head or for
    several (shared); compiled once, kept on disk.

    kernel(query `[batch, heads, 1, head_dim]` fp32, scaling, new_keys and new_values `[batch, kv_heads, 1,
    head_dim]` (or empty: no token is new), keys, key_scales, values, value_scales, allowed bool `[batch, 1 or
    kv_heads, count]` (or empty: all), count, first, last, parts, out, noted, received): writes the new token
    into slot count - 1, works through splits first..last-1, and writes each one's `[group of heads,
    head_dim + 2]` (weighted sum of V, sum of weights, largest score) into parts `[splits, heads per KV head,
    head_dim + 2]`; where these are all splits, it merges them into out `[KV heads of all rows, heads per KV
    head, head_dim]`. noted and received: the scores of these splits, and what `merge` makes of them; empty
    where nobody asks what tokens received.
    Returns False, and has done nothing that counts, where the format refuses the new token.
    """
    piece, short, sides = pieces(kind, head_dim, group)
    widened = shared and kind != F32

    @njit(nogil=True, fastmath=FAST, cache=True)
    def kernel(query, scaling, new_keys, new_values, keys, key_scales, values, value_scales, allowed, count,
               first, last, parts, out, noted, received):  # fmt: skip
        batch, kv_heads = keys.shape[:2]
        share = query.shape[1] // kv_heads
        splits, channels = (count + SPLIT - 1) // SPLIT, query.shape[3]
        total = np.empty((share, head_dim), np.float32)
        if new_keys.shape[2]:
            for b in range(batch):
                for h in range(kv_heads):
                    for side in range(2):
                        new = new_keys[b, h, 0] if side == 0 else new_values[b, h, 0]
                        codes = keys[b, h, count - 1] if side == 0 else values[b, h, count - 1]
                        scales = key_scales[b, h, count - 1] if side == 0 else value_scales[b, h, count - 1]
                        if not _write(kind, group, new, codes, scales, total[0]):
                            return False
        scores = np.empty((share, BLOCK + 3), np.float32)
        q = np.empty((share, head_dim), np.float32)
        rows = np.empty((BLOCK if widened else 1, head_dim), np.float32)
        no_scales = np.empty((BLOCK if widened else 1, 0), np.uint16)
        weight, most = np.empty(share, np.float32), np.empty(share, np.float32)
        for item in range(first, last):
            b, h = item // (kv_heads * splits), item // splits % kv_heads
            start = item % splits * SPLIT
            end = min(start + SPLIT, count)
            masked = h if allowed.shape[1] > 1 else 0
            k, ks, v, vs = keys[b, h], key_scales[b, h], values[b, h], value_scales[b, h]
            for s in range(share):
                for j in range(head_dim):
                    q[s, j] = query[b, h * share + s, 0, j] * scaling
                    total[s, j] = 0.0
                weight[s], most[s] = 0.0, FLOOR
            for at in range(start, end, BLOCK):
                size = min(BLOCK, end - at)
                if widened:
                    _widen(kind, group, k, ks, at, size, rows)
                for s in range(share):
                    mine, asked = scores[s], q[s]
                    if widened:
                        for t in range(0, size, 4):
                            _dots(F32, channels, asked, rows, no_scales, t, size - 1, mine, t)
                    elif kind >= E4M3 or group == head_dim:
                        for t in range(0, size, 4):
                            _dots(kind, channels, asked, k, ks, at + t, end - 1, mine, t)
                    else:
                        for t in range(size):
                            mine[t] = _dot(kind, head_dim, group, short, sides, asked, k[at + t], ks[at + t])
                    if allowed.shape[2]:
                        there = allowed[b, masked]
                        for t in range(size):
                            mine[t] = mine[t] if there[at + t] else FLOOR
                    if noted.shape[2]:
                        noted[b * kv_heads + h, s, at : at + size] = mine[:size]
                    _soften(mine, size, total[s], weight, most, s)
                if widened:
                    _widen(kind, group, v, vs, at, size, rows)
                for s in range(share):
                    for t in range(0, size, 4):
                        four = scores[s, t : t + 4]
                        if widened:
                            _add(F32, head_dim, head_dim, head_dim, total[s], four, rows, no_scales, t,
                                 size - 1)  # fmt: skip
                        else:
                            _add(kind, head_dim, group, piece, total[s], four, v, vs, at + t, end - 1)
            for s in range(share):
                parts[item, s, :head_dim] = total[s]
                parts[item, s, head_dim] = weight[s]
                parts[item, s, head_dim + 1] = most[s]
        if first == 0 and last == batch * kv_heads * splits:
            merge(parts.reshape(batch * kv_heads, splits, share, head_dim + 2), out, noted, received)
        return True

    return kernel
