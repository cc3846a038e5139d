"""Block: the arithmetic of a Llama-shaped block for one token of few rows, compiled by numba.

One call does all that lies between two layers' attention (`between`): output projection, residual, norm,
MLP, the next layer's norm, its projections of query, key and value, and their rotary embedding. A linear
layer is (weight `[out, in]`, scale `[out]`, bias `[out]`), read where the model has them: fp32, or the narrow
ones of `narrow.py`, bf16 as its bits and int8 with a scale of every row, which are widened in registers. What
a model lacks, a scale, a bias or a norm of heads, is an empty array. The code is compiled once for
all models with weights of one kind, and numba keeps it on disk, by versions and this file's date.
"""

from __future__ import annotations

import numpy as np
from numba import int16, njit
from numba.extending import overload

from ..kernels.cpu import FAST, _exp


def _number(weight):
    """A weight as fp32: int16 holds the upper half of such a number's bits. Compiled code alone calls it."""
    raise NotImplementedError


@overload(_number, inline="always")
def _number_of(weight):
    if weight == int16:
        return lambda weight: np.int32(np.int32(weight) << 16).view(np.float32)
    return lambda weight: np.float32(weight)


@njit(fastmath=FAST)
def _product(layer, x, out):
    """x `[rows, in]` -> out `[rows, out]`. Four rows of weights at a time, read once for all rows of x."""
    weight, scale, bias = layer
    count, width = weight.shape
    whole = count - count % 4
    for o in range(0, whole, 4):
        w0, w1, w2, w3 = weight[o], weight[o + 1], weight[o + 2], weight[o + 3]
        for r in range(x.shape[0]):
            given = x[r]
            s0 = s1 = s2 = s3 = np.float32(0.0)
            for i in range(width):
                v = given[i]
                s0 += _number(w0[i]) * v
                s1 += _number(w1[i]) * v
                s2 += _number(w2[i]) * v
                s3 += _number(w3[i]) * v
            out[r, o], out[r, o + 1], out[r, o + 2], out[r, o + 3] = s0, s1, s2, s3
    for o in range(whole, count):
        w0 = weight[o]
        for r in range(x.shape[0]):
            given = x[r]
            s0 = np.float32(0.0)
            for i in range(width):
                s0 += _number(w0[i]) * given[i]
            out[r, o] = s0
    for r in range(x.shape[0] if scale.shape[0] else 0):
        for o in range(count):
            out[r, o] *= scale[o]
    if bias.shape[0]:
        for r in range(x.shape[0]):
            for o in range(count):
                out[r, o] += bias[o]


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
    """Rotary embedding of heads `[rows, heads, 1, head_dim]`, in place: the first half of the channels with
    the second one (as Llama has them). cos, sin `[rows, channels that rotate]`."""
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


@njit(nogil=True, fastmath=FAST, cache=True)
def into(x, norm, eps, wq, wk, wv, norm_q, norm_k, cos, sin, q, k, v):
    """A layer's input x `[rows, hidden]` -> its q, k, v `[rows, heads or kv_heads, 1, head_dim]`."""
    rows = x.shape[0]
    given = np.empty_like(x)
    _norm(x, norm, eps, given)
    _product(wq, given, q.reshape(rows, -1))
    _product(wk, given, k.reshape(rows, -1))
    _product(wv, given, v.reshape(rows, -1))
    if norm_q.shape[0]:
        heads_q, heads_k = q.reshape(-1, q.shape[3]), k.reshape(-1, k.shape[3])
        _norm(heads_q, norm_q, eps, heads_q)
        _norm(heads_k, norm_k, eps, heads_k)
    _rotate(q, cos, sin)
    _rotate(k, cos, sin)


@njit(nogil=True, fastmath=FAST, cache=True)
def out_of(attended, x, wo, norm, eps, wg, wu, wd):
    """What a layer attended to `[rows, heads * head_dim]`, and its MLP, are added to x `[rows, hidden]`."""
    rows = x.shape[0]
    added, given = np.empty_like(x), np.empty_like(x)
    _product(wo, attended, added)
    x += added
    _norm(x, norm, eps, given)
    gate, up = np.empty((rows, wg[0].shape[0]), np.float32), np.empty((rows, wu[0].shape[0]), np.float32)
    _product(wg, given, gate)
    _product(wu, given, up)
    _silu(gate, up)
    _product(wd, gate, added)
    x += added


@njit(nogil=True, fastmath=FAST, cache=True)
def between(attended, x, wo, after, eps, wg, wu, wd,
            norm, wq, wk, wv, norm_q, norm_k, cos, sin, q, k, v):  # fmt: skip
    """From one layer's attention to the next one's: `out_of` the first, `into` the second."""
    out_of(attended, x, wo, after, eps, wg, wu, wd)
    into(x, norm, eps, wq, wk, wv, norm_q, norm_k, cos, sin, q, k, v)


@njit(nogil=True, fastmath=FAST, cache=True)
def logits(attended, x, wo, after, eps, wg, wu, wd, norm, head, out):
    """From the last layer's attention to logits `[rows, vocabulary]`."""
    out_of(attended, x, wo, after, eps, wg, wu, wd)
    given = np.empty_like(x)
    _norm(x, norm, eps, given)
    _product(head, given, out)
