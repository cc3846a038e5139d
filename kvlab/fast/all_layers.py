"""All layers: a step through all layers in one call, if every cache layer only adds a token and drops one of
every head."""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import torch

from ..arithmetic import count_kernel
from . import block
from .attend import ALL, NONE, UNOBSERVED
from .cpu import SPLIT, merge
from .eviction import Eviction
from .layers import HELD, address, layers
from .step import made, way
from .team import NOBODY, together

VECTOR, MATRIX, CUBE, HEADS = (np.empty((0,) * rank, np.float32) for rank in (1, 2, 3, 4))  # like arguments


class AllLayers:
    """A body's weights as arguments of `layers.py`, and the caches that it has served.

    into, out_of: every layer's arrays, as `block.into` and `block.out_of` take them; last: the last norm and
    the head, as `block.logits` does.
    """

    def __init__(self, body, into: tuple, out_of: tuple, last: tuple):
        self.heads, self.kv_heads, self.head_dim = body.heads, body.kv_heads, body.head_dim
        self.arrays = [[*_flat(before), *_flat(after)] for before, after in zip(into, out_of, strict=True)]
        self.weights = np.array([[one.size and one.ctypes.data for one in some] for some in self.arrays])
        shapes = {tuple((one.shape, one.dtype) for one in some) for some in self.arrays}
        kinds = {one.dtype for one in (*self.arrays[0], last[1][0]) if one.ndim == 2}
        self.alike = len(shapes) == len(kinds) == 1  # all layers have weights of the same sizes and one kind
        self.like, self.inner = np.empty((0, 0), kinds.pop()), len(out_of[0][3][0])
        after, end = (MATRIX, MATRIX, *out_of[0]), (VECTOR, NOBODY, True)
        self.into = address(block.into, MATRIX, *into[0], MATRIX, MATRIX, HEADS, HEADS, HEADS, *end)
        self.out_of = address(block.out_of, *after, *end)
        self.merge = address(merge, HEADS, CUBE, CUBE, MATRIX)
        self.last, self.logits = last, address(block.logits, *after, *last, MATRIX, *end)
        self.eps, self.scalings = body.eps, np.array([one.scaling for one in body.attentions], np.float32)
        self.read = sum(numbers for numbers, _ in (*body.into, *body.out_of, body.last))  # of weights
        self.caches = weakref.WeakKeyDictionary()

    def step(self, cache, x, cos, sin, room, said) -> bool:
        """The input of the layers, x `[rows, hidden]`, is spoilt; said `[rows, vocabulary]` become the
        logits. False if another way must be taken, since a layer does more, or a format refuses the token."""
        ways = {way(layer) for layer in cache.layers} if self.alike else {None}
        if len(ways) > 1 or None in ways:
            return False
        told, rows = self.caches.get(cache), len(x)
        if told is None or not told.still(cache.layers):
            told = self.caches[cache] = Arguments(self, cache.layers)
        if told.code is None or told.rows != rows:
            return False
        counts = [layer.store.filled + 1 for layer in cache.layers]
        most, width, share = max(counts), self.head_dim, self.heads // self.kv_heads
        held = told.held.copy()  # a thread that comes late may look at it in the next step
        held[:, -1] = counts
        read = self.read + 2 * rows * self.kv_heads * sum(counts) * width
        numbers = self.heads, self.kv_heads, self.kv_heads
        q, k, v = (np.empty((rows, count, 1, width), np.float32) for count in numbers)
        parts = np.empty((rows * self.kv_heads * -(-most // SPLIT), share, width + 2), np.float32)
        out = np.empty((rows * self.kv_heads, share, width), np.float32)
        goes = Eviction(cache.layers, ways.pop(), self.heads)
        cache.layers[0]._busy = True  # until the host has counted what the code has written
        refused = together(
            read, layers, told.code, x, self.weights, held, self.like, *told.kinds, self.scalings, self.eps,
            self.inner, cos, sin, q, k, v, *self.last, said, room, NONE[q.dtype], SPLIT, parts, out,
            *goes.told, teams=len(held) + 1,
        )  # fmt: skip
        if refused > 0 and goes.how:  # the layers before it have closed up their slots
            raise ValueError(
                f"layer {refused}: its format does not store the token; start again with cache.reset()"
            )
        if refused >= 0:
            cache.layers[0]._busy = False
            return False
        for index, scaling in enumerate(self.scalings.tolist()):
            goes.done(index, cache.layers[index], scaling)
        cache.layers[0]._busy = False
        count_kernel(4 * q.size * sum(counts))
        return True


class Arguments:
    """The arguments for a cache. code: None if its layers differ, or use kernels other than those of
    `cpu.py`. It keeps no buffer alive."""

    def __init__(self, of: AllLayers, held):
        fused = list(map(made, held))
        self.fused, self.code = list(map(weakref.ref, fused)), None
        known = {(one.kernel, one.asked, one.dtype, one.turns) for one in fused}
        (kernel, asked, dtype, turns), *others = known
        if others or isinstance(kernel, partial) or dtype != torch.float32 or turns:
            return
        arrays, self.rows = [one.held for one in fused], asked[0]
        self.held = np.zeros((len(arrays), HELD), np.int64)
        self.held[:, :4] = [[part.ctypes.data for part in parts] for parts in arrays]
        self.held[:, 4] = [parts[0].shape[2] for parts in arrays]
        self.kinds = [np.empty((0, *part.shape[1:]), part.dtype) for part in arrays[0][:2]]
        new, numbers = (HEADS, np.float32(1), HEADS, HEADS), (0, 0, 0)
        attend = address(kernel, *new, *self.kinds, *self.kinds, ALL, *numbers, CUBE, CUBE, *UNOBSERVED)
        self.code = np.array([of.into, attend, of.merge, of.out_of, of.logits])

    def still(self, held) -> bool:
        """Whether it is of the buffers of these layers."""
        return all(mine() is made(layer) for mine, layer in zip(self.fused, held, strict=True))


def _flat(given: tuple) -> list[np.ndarray]:
    """The arrays among a layer's arguments, one after the other."""
    parts = [one if isinstance(one, tuple) else (one,) for one in given if not np.isscalar(one)]
    return [array for some in parts for array in some]
