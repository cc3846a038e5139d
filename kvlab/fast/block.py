"""Block: the arithmetic of a Llama-shaped block for one token of few rows, compiled by numba.

`into` computes the part before a layer's attention: norm, projections of query, key and value, and their
rotary embedding. `out_of` computes the part after it: output projection, residual, norm and MLP. A linear
layer is (weight `[out, in]`, scale `[out]`, bias `[out]`), read from the model's own memory. Weights are
fp32, or in a narrow type of `narrow.py`: bf16 as bits, or int8 with a scale for each row. Narrow weights are
widened in registers. A scale, bias or norm of heads that the model does not have is an empty array. Several
threads may run one call: see `team.py` for `team` and `leads`. `room` holds intermediate results, at least
2 * rows * (hidden + MLP) numbers. The code is compiled once for all models with weights of one kind. numba
caches it on disk by versions and this file's text, so the text names the digest of the code compiled in.
"""

# Compiled into this: fast/cpu.py cc080165, fast/lanes.py d5a701e7, fast/team.py 2c43d307

from __future__ import annotations

import numpy as np
from numba import int16, njit
from numba.extending import overload

from .cpu import _exp
from .lanes import FAST
from .team import SHARE, done, due, joined, opened, taken

SIDE = 4  # rows of x that are multiplied at a time


def _number(weight):
    """A weight as fp32. An int16 weight is the upper half of the bits of an fp32 number. Only for compiled
    code."""
    raise NotImplementedError


@overload(_number, inline="always")
def _number_of(weight):
    if weight == int16:
        return lambda weight: np.int32(np.int32(weight) << 16).view(np.float32)
    return lambda weight: np.float32(weight)


@njit(fastmath=FAST)
def _rows(layer, x, out, first, last):
    """Rows `first` to `last` of a layer: x `[rows, in]` -> out[:, first:last]. Each row of weights is read
    from beginning to end, in memory order: a processor prefetches one stream well, and reading four rows side
    by side took up to twice as long."""
    weight, scale, bias = layer
    width, count = weight.shape[1], x.shape[0]
    whole = count - count % SIDE
    for o in range(first, last):
        w = weight[o]
        for r in range(0, whole, SIDE):
            x0, x1, x2, x3 = x[r], x[r + 1], x[r + 2], x[r + 3]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for i in range(width):
                v = _number(w[i])
                s0 += v * x0[i]
                s1 += v * x1[i]
                s2 += v * x2[i]
                s3 += v * x3[i]
            out[r, o], out[r + 1, o], out[r + 2, o], out[r + 3, o] = s0, s1, s2, s3
        for r in range(whole, count):
            given = x[r]
            s0 = np.float32(0.0)
            for i in range(width):
                s0 += _number(w[i]) * given[i]
            out[r, o] = s0
    for r in range(x.shape[0] if scale.shape[0] else 0):
        for o in range(first, last):
            out[r, o] *= scale[o]
    if bias.shape[0]:
        for r in range(x.shape[0]):
            for o in range(first, last):
                out[r, o] += bias[o]


@njit(fastmath=FAST)
def _product(layer, x, out, product, team, leads):
    """x `[rows, in]` -> out `[rows, out]`, or this thread's share of it. product: the product's number in the
    call."""
    count, width = layer[0].shape
    size = count if team.shape[0] == 0 else max(1, SHARE // width)
    if team.shape[0] and leads:
        due(team, (count + size - 1) // size)
    first = taken(team, product, size, count) if team.shape[0] else 0
    while first < count:
        _rows(layer, x, out, first, min(first + size, count))
        if team.shape[0]:
            done(team)
            first = taken(team, product, size, count)
        else:
            first = count


@njit(fastmath=FAST)
def _norm(x, weight, eps, out):
    """Root mean square norm of every row."""
    for r in range(x.shape[0]):
        total = np.float32(0.0)
        for i in range(x.shape[1]):
            total += x[r, i] * x[r, i]
        size = np.float32(1.0) / np.sqrt(total / np.float32(x.shape[1]) + eps)
        for i in range(x.shape[1]):
            out[r, i] = weight[i] * (x[r, i] * size)


@njit(fastmath=FAST)
def _rotate(x, cos, sin):
    """Rotary embedding of heads `[rows, heads, 1, head_dim]`, in place. The first half of the channels is
    paired with the second half (as in Llama). cos, sin `[rows, channels that rotate]`."""
    half = cos.shape[1] // 2
    for r in range(x.shape[0]):
        for h in range(x.shape[1]):
            head = x[r, h, 0]
            for j in range(half):
                first, second = head[j], head[half + j]
                head[j] = first * cos[r, j] - second * sin[r, j]
                head[half + j] = second * cos[r, half + j] + first * sin[r, half + j]


@njit(fastmath=FAST)
def _silu(gate, up):
    """gate <- silu(gate) * up, of the same shape."""
    for r in range(gate.shape[0]):
        for i in range(gate.shape[1]):
            x = gate[r, i]
            small = _exp(-abs(x))  # of the exponential's side that does not overflow
            gate[r, i] = x * up[r, i] * (np.float32(1.0) if x >= 0 else small) / (np.float32(1.0) + small)


@njit(fastmath=FAST)
def _cut(room, x, inner):
    """The four buffers in `room`, each `[rows, ..]`: two of the hidden size, two of the MLP's size."""
    rows, hidden = x.shape
    flat, wide, end = rows * hidden, rows * inner, 2 * rows * (hidden + inner)
    return (
        room[:flat].reshape(rows, hidden), room[flat : 2 * flat].reshape(rows, hidden),
        room[2 * flat : end - wide].reshape(rows, inner), room[end - wide : end].reshape(rows, inner),
    )  # fmt: skip


# Parts of a call that a team goes through, and all the products, by number.
# `out_of`: 1 is product 0 (o), 2 is 1 and 2 (gate, up), 3 is 3 (down). Then 4: q, k, v are 4 to 6, head 4.


@njit(nogil=True, fastmath=FAST, cache=True)
def into(x, norm, eps, wq, wk, wv, norm_q, norm_k, cos, sin, q, k, v, room, team, leads):
    """A layer's input x `[rows, hidden]` -> its q, k, v `[rows, heads or kv_heads, 1, head_dim]`."""
    rows = x.shape[0]
    given, _, _, _ = _cut(room, x, 0)
    if leads:
        _norm(x, norm, eps, given)
    if not opened(team, 4, leads):
        return
    _product(wq, given, q.reshape(rows, -1), 4, team, leads)
    _product(wk, given, k.reshape(rows, -1), 5, team, leads)
    _product(wv, given, v.reshape(rows, -1), 6, team, leads)
    if leads:
        joined(team)
        if norm_q.shape[0]:
            heads_q, heads_k = q.reshape(-1, q.shape[3]), k.reshape(-1, k.shape[3])
            _norm(heads_q, norm_q, eps, heads_q)
            _norm(heads_k, norm_k, eps, heads_k)
        _rotate(q, cos, sin)
        _rotate(k, cos, sin)


@njit(nogil=True, fastmath=FAST, cache=True)
def out_of(attended, x, wo, norm, eps, wg, wu, wd, room, team, leads):
    """Add the projected attention output of a layer `[rows, heads * head_dim]`, and its MLP, to x `[rows,
    hidden]`."""
    added, given, gate, up = _cut(room, x, wg[0].shape[0])
    if not opened(team, 1, leads):
        return
    _product(wo, attended, added, 0, team, leads)
    if leads:
        joined(team)
        x += added
        _norm(x, norm, eps, given)
    if not opened(team, 2, leads):
        return
    _product(wg, given, gate, 1, team, leads)
    _product(wu, given, up, 2, team, leads)
    if leads:
        joined(team)
        _silu(gate, up)
    if not opened(team, 3, leads):
        return
    _product(wd, gate, added, 3, team, leads)
    if leads:
        joined(team)
        x += added


@njit(nogil=True, fastmath=FAST, cache=True)
def logits(attended, x, wo, after, eps, wg, wu, wd, norm, head, out, room, team, leads):
    """The rest of the step after the last layer's attention, up to logits `[rows, vocabulary]`."""
    out_of(attended, x, wo, after, eps, wg, wu, wd, room, team, leads)
    given, _, _, _ = _cut(room, x, 0)
    if leads:
        _norm(x, norm, eps, given)
    if opened(team, 4, leads):
        _product(head, given, out, 4, team, leads)
    if leads:
        joined(team)
