"""A decode step's attention over formats of many kinds, on a CPU: one kernel, compiled once for them all.

The kernel works as in `cpu.py`, but format, head dimension and groups are arguments. The formats are integers
of 2 to 8 bits in planes, 4-bit floats in blocks, levels of a codebook, and KIVI: K with a scale and zero
point for each channel of a block of tokens, V with those of each token, and a window of recent tokens in
full. Each block of K, and then of V, is widened to fp32 once for all query heads that share it, and stays in
the processor's cache while they attend. Codes are moved from planes into bytes eight at a time, in a 64-bit
word; if the head dimension is no multiple of 64, four at a time in 32 bits.

A layout (`sides.py` makes it of a store) is a `Side` of K and one of V, five numbers each: the form (bits of
an integer, `NVFP4`, `MXFP4`, or `LEVELS` plus the bits of a codebook), how many channels share a scale, how
many tokens share it (0: every token has its own), how many of those tokens the first block lacks, and how
many tokens are quantized; the others are in the window. Codes are words `[batch, kv_heads, tokens,
width / 4]`. Scales and zero points are bytes: fp16 in `[.., groups * 2]`, or `[.., groups]`. A codebook has
its levels, in fp32, in place of zero points. The kernel reads and writes the same bits as `store/int.py`,
`planes.py`, `float4.py`, `codebook.py` and `kivi.py`; only a codebook writes its own tokens. Loops over
tokens index whole arrays: numba counts references to a slice, which takes longer than the token.
"""

# Compiled into this: fast/cpu.py cc080165, fast/lanes.py d5a701e7

from __future__ import annotations

import numpy as np
from numba import njit

from .cpu import FLOOR, SPLIT, _eight, _half, _round_up, _soften, at_once, merge
from .lanes import E4M3, F32, FAST, LANES, add_up, dots

Side = tuple[int, int, int, int, int]
BLOCK = 128  # tokens whose numbers are held at a time
NVFP4, MXFP4, LEVELS = 16, 17, 32  # forms beside the bits of an integer
FOURS, TWOS, ONES = np.int32(0x0F0F0F0F), np.int32(0x03030303), np.int32(0x01010101)  # bits of four codes
EIGHT_ONES = np.int64(0x0101010101010101)
SIGNS = np.int32(-0x7F7F7F80)  # the highest bit of four bytes


@njit(inline="always", fastmath=FAST)
def _number(scales, at, index):
    """The fp16 number, finite, at place `index` of the bytes of row `at`, as fp32."""
    low, high = np.int32(scales[at, 2 * index]), np.int32(scales[at, 2 * index + 1])
    size = _half(np.int32(low | (high & 127) << 8))
    return -size if high & 128 else size


@njit(inline="always", fastmath=FAST)
def _spread(bits, ones, eighth, words, token, i, spread, t):
    """Word i of every plane of a token -> words i, eighth + i, ... of its codes, one a byte.

    For every e below 8, a plane of w bits holds the codes of the channels from e to e + 1 eighths in its
    words from (e % w) * eighth on: in the lowest bits if e < w, above these for the next w, and so on."""
    word = words.dtype.type  # of 32 or 64 bits: what numba widens is cut back to it at once
    twos, fours = word(word(3) * ones), word(word(15) * ones)
    two = 4 * eighth if bits & 4 else 0  # where the planes of 2 bits, and of 1, begin
    one = two + (2 * eighth if bits & 2 else 0)
    for e in range(8):
        codes = word(0)
        if bits & 4:
            codes |= word((words[token, e % 4 * eighth + i] >> word(4 * (e // 4))) & fours)
        if bits & 2:
            part = word((words[token, two + e % 2 * eighth + i] >> word(2 * (e // 2))) & twos)
            codes |= word(part << word(bits & 4))
        if bits & 1:
            part = word((words[token, one + i] >> word(e)) & ones)
            codes |= word(part << word(bits & 6))
        spread[t, e * eighth + i] = codes


@njit(fastmath=FAST)
def _unpack_words(bits, ones, words, at, size, spread):
    """`_unpack`, in words of 32 or 64 bits. ones: a word in which the lowest bit of every byte is set."""
    eighth = spread.shape[1] // 8
    for t in range(size):
        for i in range(eighth):
            if bits == 2:
                _spread(2, ones, eighth, words, at + t, i, spread, t)
            elif bits == 3:
                _spread(3, ones, eighth, words, at + t, i, spread, t)
            elif bits == 4:
                _spread(4, ones, eighth, words, at + t, i, spread, t)
            elif bits == 5:
                _spread(5, ones, eighth, words, at + t, i, spread, t)
            elif bits == 6:
                _spread(6, ones, eighth, words, at + t, i, spread, t)
            elif bits == 7:
                _spread(7, ones, eighth, words, at + t, i, spread, t)
            else:  # signed bytes
                for e in range(8):
                    spread[t, e * eighth + i] = words[at + t, e * eighth + i] ^ (ones << words.dtype.type(7))


@njit(fastmath=FAST)
def _unpack(bits, words, at, size, spread):
    """The codes, 0 to 2^bits - 1, of `size` tokens from `at` on, four in each word of `spread` `[tokens,
    head_dim / 4]`."""
    if spread.shape[1] % 16 == 0:
        _unpack_words(bits, EIGHT_ONES, words.view(np.int64), at, size, spread.view(np.int64))
    else:
        _unpack_words(bits, ONES, words, at, size, spread)


@njit(inline="always", fastmath=FAST)
def _small(code):
    """The number that 4 bits of a 4-bit float stand for: a sign, and 0, .5, 1, 1.5, 2, 3, 4 or 6."""
    size = np.int32(np.int32(code) & np.int32(7))
    normal = np.int32(np.int32(size << 22) + np.int32(126 << 23)).view(np.float32)
    number = normal if size > 1 else np.float32(size) * np.float32(0.5)
    return -number if code & 8 else number


@njit(inline="always", fastmath=FAST)
def _step(form, byte):
    """The value of the stored scale of a block of 4-bit floats: an exponent, or e4m3."""
    if form == MXFP4:
        return np.int32(np.int32(byte) << 23).view(np.float32)
    bits = np.int32(byte)
    normal = np.int32(((bits & 127) << 20) + (120 << 23)).view(np.float32)
    size = normal if bits & 120 else np.float32(np.int32(bits & 7)) * np.float32(2.0**-9)
    return -size if bits & 128 else size


@njit(fastmath=FAST)
def _widen(side, words, scales, zeros, window, at, size, rows, spread, codes, steps, bases):
    """The numbers of `size` tokens from `at` on -> rows `[tokens, head_dim]`. side: see above; scales, zeros
    (or none): of every token or block. Buffers: spread, and the same as bytes, codes `[tokens, head_dim]`;
    steps and bases `[head_dim]` for the scales and zero points of a block."""
    form, group, span, short, written = side
    head_dim, block = rows.shape[1], -1
    coded, groups = max(0, min(size, written - at)), head_dim // group
    grouped, coded_groups = rows.reshape(-1, group), codes.reshape(-1, group)
    _unpack(form - LEVELS if form >= LEVELS else (4 if form >= NVFP4 else form), words, at, coded, spread)
    if form >= LEVELS:
        levels = zeros.reshape(-1).view(np.float32)
        for t in range(coded):
            step = _number(scales, at + t, 0)
            for j in range(head_dim):
                rows[t, j] = levels[codes[t, j]] * step
        return
    for t in range(coded):
        if span:
            if (at + t + short) // span != block:
                block = (at + t + short) // span
                for j in range(head_dim):
                    steps[j], bases[j] = _number(scales, block, j), _number(zeros, block, j)
            for j in range(head_dim):
                rows[t, j] = np.float32(codes[t, j]) * steps[j] + bases[j]
            continue
        for g in range(groups):
            at_group = t * groups + g
            if form >= NVFP4:
                step = _step(form, scales[at + t, g])
                for j in range(group):
                    grouped[at_group, j] = step * _small(coded_groups[at_group, j])
            else:
                step = _number(scales, at + t, g)
                base = _number(zeros, at + t, g) if zeros.shape[0] else -step * np.float32(1 << (form - 1))
                for j in range(group):
                    grouped[at_group, j] = np.float32(coded_groups[at_group, j]) * step + base
    for t in range(coded, size):
        for j in range(head_dim):
            rows[t, j] = window[at + t - written, j]


# What is written has the bits that the formats write, see `cpu.py`.


@njit(fastmath=False)
def _write(form, group, x, words, scales, spread, codes):
    """One token's K or V `[head_dim]` in its stored form; False for a value that the format refuses.
    Buffers: spread, and the same as bytes, codes `[head_dim]`."""
    head_dim = x.shape[0]
    middle = np.float32(1 << (form - 1)) if form < NVFP4 else np.float32(0.0)  # the code of 0
    qmax = middle - np.float32(1.0)
    limit = np.float32(65504.0) * qmax if form < NVFP4 else np.float32(2688.0 if form == NVFP4 else np.inf)
    for g in range((head_dim + group - 1) // group):
        start, end = g * group, min((g + 1) * group, head_dim)
        most = np.float32(0.0)
        for j in range(start, end):
            size = np.float32(abs(x[j]))
            if not size <= limit or size == np.inf:
                return False
            most = max(most, size)
        if form < NVFP4:
            bits = _round_up(most / qmax)
            scales[2 * g], scales[2 * g + 1] = np.uint8(bits & 255), np.uint8(bits >> 8)
            step = max(_half(bits), np.float32(2.0**-24))
            for j in range(start, end):
                codes[j] = np.uint8(np.int32(np.rint(np.float32(x[j]) / step) + middle))
            continue
        if form == NVFP4:
            scales[g] = _eight(E4M3, most / np.float32(6.0))
        else:  # an exponent, less 2
            scales[g] = np.uint8(max(np.int32(np.float32(most).view(np.int32) >> 23) - 2, 0))
        step = max(_step(form, scales[g]), np.float32(2.0**-126))
        for j in range(start, end):
            size = np.float32(abs(x[j])) / step  # the grid's steps: see `Float4._codes`
            near = min(np.float32(2.0) * size, size + np.float32(2.0))
            near = np.rint(min(near, size / np.float32(2.0) + np.float32(4.0)))
            codes[j] = np.uint8(np.int32(min(near, np.float32(7.0))) + (8 if x[j] < 0 else 0))
    _pack(4 if form >= NVFP4 else form, spread, words)
    return True


@njit(fastmath=False)
def _put(x, row):
    """Write one token's K or V in full; False for a value too large for the fp16 scales of KIVI's blocks."""
    for j in range(x.shape[0]):
        if not abs(x[j]) <= np.float32(65504.0):
            return False
        row[j] = x[j]
    return True


@njit(fastmath=False)
def _pack(bits, spread, words):
    """The inverse of `_unpack`, for one token."""
    eighth, at, done = spread.shape[0] // 8, 0, 0
    if bits == 8:
        for i in range(words.shape[0]):
            words[i] = spread[i] ^ SIGNS
        return
    words[:] = 0
    for width in (4, 2, 1):
        if bits & width:
            mask = FOURS if width == 4 else (TWOS if width == 2 else ONES)
            for e in range(8):
                for i in range(eighth):
                    part = np.int32((spread[e * eighth + i] >> np.int32(done)) & mask)
                    words[at + e % width * eighth + i] |= np.int32(part << np.int32(width * (e // width)))
            at, done = at + width * eighth, done + width


@njit(nogil=True, fastmath=FAST, cache=True)
def kernel(layout, key_zeros, value_zeros, recent_keys, recent_values,
           query, scaling, new_keys, new_values, keys, key_scales, values, value_scales, allowed, count,
           first, last, parts, out, noted, received):  # fmt: skip
    """See `cpu.compiled`. layout: see above; key_zeros, value_zeros: zero points, or none; recent_keys,
    recent_values `[batch, kv_heads, tokens, head_dim]`: the tokens after those that are written."""
    batch, kv_heads = keys.shape[:2]
    head_dim, share = query.shape[3], query.shape[1] // kv_heads
    splits = (count + SPLIT - 1) // SPLIT
    spread = np.empty((BLOCK, head_dim // 4), np.int32)
    codes = spread.view(np.uint8)
    if new_keys.shape[2]:
        for b in range(batch):
            for h in range(kv_heads):
                for side in range(2):
                    new = new_keys[b, h, 0] if side == 0 else new_values[b, h, 0]
                    if count > layout[side][4]:
                        window = recent_keys[b, h] if side == 0 else recent_values[b, h]
                        if not _put(new, window[count - 1 - layout[side][4]]):
                            return False
                        continue
                    words = keys[b, h, count - 1] if side == 0 else values[b, h, count - 1]
                    scales = key_scales[b, h, count - 1] if side == 0 else value_scales[b, h, count - 1]
                    form, group = layout[side][0], layout[side][1]
                    if not _write(form, group, new, words, scales, spread[0], codes[0]):
                        return False
    rows, no_steps = np.empty((BLOCK, head_dim), np.float32), np.empty((0, 0), np.float32)
    steps, bases = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    heads = at_once(share)
    rounded = (share + heads - 1) // heads * heads
    scores, q = np.empty((rounded, BLOCK + LANES), np.float32), np.empty((rounded, head_dim), np.float32)
    total = np.empty((rounded, head_dim), np.float32)
    weight, most = np.empty(share, np.float32), np.empty(share, np.float32)
    q[:] = 0.0
    for item in range(first, last):
        b, h = item // (kv_heads * splits), item // splits % kv_heads
        start = item % splits * SPLIT
        end = min(start + SPLIT, count)
        masked = h if allowed.shape[1] > 1 else 0
        for s in range(share):
            for j in range(head_dim):
                q[s, j] = query[b, h * share + s, 0, j] * scaling
            weight[s], most[s] = 0.0, FLOOR
        total[:] = 0.0
        for at in range(start, end, BLOCK):
            size = min(BLOCK, end - at)
            _widen(layout[0], keys[b, h], key_scales[b, h], key_zeros[b, h], recent_keys[b, h], at, size,
                   rows, spread, codes, steps, bases)  # fmt: skip
            for s in range(0, rounded, heads):
                _dots(heads, q, s, rows, no_steps, size, scores)
            for s in range(share):
                if allowed.shape[2]:
                    for t in range(size):
                        scores[s, t] = scores[s, t] if allowed[b, masked, at + t] else FLOOR
                if noted.shape[2]:
                    for t in range(size):
                        noted[b * kv_heads + h, s, at + t] = scores[s, t]
                _soften(scores, s, size, total, weight, most)
            _widen(layout[1], values[b, h], value_scales[b, h], value_zeros[b, h], recent_values[b, h], at,
                   size, rows, spread, codes, steps, bases)  # fmt: skip
            for s in range(0, rounded, heads):
                _add_up(heads, total, s, scores, rows, no_steps, size)
        for s in range(share):
            for j in range(head_dim):
                parts[item, s, j] = total[s, j]
            parts[item, s, head_dim] = weight[s]
            parts[item, s, head_dim + 1] = most[s]
    if first == 0 and last == batch * kv_heads * splits:
        merge(parts.reshape(batch * kv_heads, splits, share, head_dim + 2), out, noted, received)
    return True


@njit(fastmath=FAST)
def _dots(heads, q, s, rows, steps, size, scores):
    """`dots` for a number of heads and a block; the number must be a constant when this is compiled."""
    width = rows.shape[1]
    if heads == 1:
        dots(F32, 1, 0, width, q, s, rows, steps, size, scores)
    elif heads == 2:
        dots(F32, 2, 0, width, q, s, rows, steps, size, scores)
    elif heads == 3:
        dots(F32, 3, 0, width, q, s, rows, steps, size, scores)
    else:
        dots(F32, 4, 0, width, q, s, rows, steps, size, scores)


@njit(fastmath=FAST)
def _add_up(heads, total, s, scores, rows, steps, size):
    """`add_up`, likewise."""
    width = rows.shape[1]
    if heads == 1:
        add_up(F32, 1, 0, width, total, s, scores, rows, steps, size)
    elif heads == 2:
        add_up(F32, 2, 0, width, total, s, scores, rows, steps, size)
    elif heads == 3:
        add_up(F32, 3, 0, width, total, s, scores, rows, steps, size)
    else:
        add_up(F32, 4, 0, width, total, s, scores, rows, steps, size)
