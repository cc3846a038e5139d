"""Layers: all layers of a decode step in one compiled call, their attention and the logits included.

Layer by layer, Python needs some 40 µs between two compiled calls. As long as a step only adds a token to the
cache, Python does the same in every layer. So the compiled code here calls `block.into`, a kernel of
`fast/cpu.py` and `block.out_of` for each layer, and `block.logits` at the end. All of them are called by
address, so this file is compiled once for all formats, in a second. Their arrays are found by address, too:
unpacking the hundreds of arrays of a model would cost as much time as is saved. The caller must keep these
arrays alive.

A model's weights are int64 `[layers, WEIGHTS]`: the address of every array of a layer, in the order in which
`block.into` and `block.out_of` take them: weight, scale and bias of each linear layer (address 0: the model
has none). The cache is int64 `[layers, HELD]`: the addresses of K, its scales, V and its scales, as the
kernel takes them, the number of tokens that fit, and the number of tokens with the new one.

If a step evicts one token of every head (`fast/closing.py`), int64 `[layers, TABLES]` has the addresses of
the slots' positions and of the attention that they received: before the step, after it, and after empty slots
are closed up; and the number of slots then. Eviction comes last, so a step that a format refuses has changed
nothing. int64 `[layers, rows, 3]` has the first and the last position that may be evicted, and the position
of the new token.

Several threads may run one call (`team.py`), and they enter once for all layers. Each layer, with the part
before its attention, has a team of its own, and so have the logits. A layer's splits are shared among threads
as rows of weights are in `block.py`.
"""

# Compiled into this: fast/closing.py 277aae4a, fast/lanes.py d5a701e7, fast/team.py 2c43d307

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import carray, njit, typeof, types
from numba.core.cgutils import if_unlikely, unpack_tuple
from numba.extending import intrinsic

from .closing import draw_up, leave
from .known import NEWEST, SUM
from .lanes import FAST
from .team import COUNTERS, SHARE, done, due, joined, opened, taken

WEIGHTS, HELD, TABLES = 25, 6, 7
ATTENTION, SPLITS = 5, 7  # a part, and a number of what is shared out, that `block.py` does not use


def address(function, *given) -> int:
    """The address of the code that numba compiles from this function for arguments like these."""
    kinds = tuple(map(typeof, given))
    function.compile(kinds)
    made = function.overloads[kinds]
    return made.library.get_pointer_to_function(made.fndesc.llvm_func_name)


def _caller(found):
    """A compiled function: (address, arguments) -> the result of the code at that address, of type
    `found`."""

    @intrinsic
    def call(context, address, given):
        kinds = [types.unliteral(kind) for kind in given.types]

        def code(context, builder, signature, values):
            where, convention = values[0], context.call_conv
            pointer = builder.inttoptr(where, convention.get_function_type(found, kinds).as_pointer())
            taken = unpack_tuple(builder, values[1])
            status, out = convention.call_function(builder, pointer, found, kinds, taken)
            with if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return out

        return found(types.int64, types.Tuple(kinds)), code

    return call


_do, _ask = _caller(types.none), _caller(types.boolean)


@intrinsic
def _pointer(context, address):
    """An address as a pointer."""

    def code(context, builder, signature, given):
        return builder.inttoptr(given[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


@njit
def _vector(address, size):
    """fp32 `[size]` at an address; empty where there is none."""
    return carray(_pointer(address), size if address else 0, np.float32)


@njit
def _linear(at, first, rows, width, like):
    """(Weight `[rows, width]` of the kind of `like`, scale, bias) of a linear layer, whose first address is
    the layer's number `first`."""
    weight = carray(_pointer(at[first]), (rows, width), like.dtype)
    return weight, _vector(at[first + 1], rows), _vector(at[first + 2], rows)


@njit
def _kept(address, shape, like):
    """One of a cache's buffers, shape `(rows, kv_heads, capacity)` and a token's width."""
    return carray(_pointer(address), (*shape, like.shape[3]), like.dtype)


@njit
def _found(positions, masks):
    """Mark the slots that hold a token: masks bool `[rows, kv_heads, slots + 1]`, with the new token's
    slot."""
    slots = positions.shape[2]
    for r in range(positions.shape[0]):
        for h in range(positions.shape[1]):
            for t in range(slots):
                masks[r, h, t] = positions[r, h, t] >= 0
            masks[r, h, slots] = True


@njit(fastmath=False)
def _averaged(received, rows):
    """received `[KV heads of all rows, tokens]`: each head gets the mean over the heads of its row."""
    heads = received.shape[0] // rows
    for r in range(rows):
        mean = received[r * heads]
        for h in range(1, heads):
            mean += received[r * heads + h]
        mean /= np.float32(heads)
        for h in range(1, heads):
            received[r * heads + h] = mean


@njit
def _slots(tables, first, rows, kv_heads, slots, sums):
    """A layer's positions and the attention that its slots received: its addresses `first` and `first +
    1`."""
    return (carray(_pointer(tables[first]), (rows, kv_heads, slots), np.int32),
            carray(_pointer(tables[first + 1]), (rows, kv_heads, slots * sums), np.float32))  # fmt: skip


@njit
def _leave(goes, tables, rules, received, keys, rows, kv_heads, count):
    """Evict one token of every head of a layer."""
    positions, sums = _slots(tables, 0, rows, kv_heads, count - 1, goes == SUM)
    left, left_sums = _slots(tables, 2, rows, kv_heads, count, goes == SUM)
    if goes == NEWEST:
        _averaged(received, rows)
    for r in range(rows):
        first, last, newest = rules[r]
        for h in range(kv_heads):
            leave(goes, received[r * kv_heads + h], keys[:count], first, last, newest, positions[r, h],
                  sums[r, h], left[r, h], left_sums[r, h])  # fmt: skip


@njit
def _buffers(held, rows, kv_heads, codes, scales):
    """A layer's K, its scales, V and its scales."""
    kept = rows, kv_heads, held[4]
    return (_kept(held[0], kept, codes), _kept(held[1], kept, scales),
            _kept(held[2], kept, codes), _kept(held[3], kept, scales))  # fmt: skip


@njit
def _draw_up(goes, tables, held, rows, kv_heads, codes, scales):
    """Close up the empty slots of a layer."""
    left, left_sums = _slots(tables, 2, rows, kv_heads, held[5], goes == SUM)
    positions, sums = _slots(tables, 4, rows, kv_heads, tables[6], goes == SUM)
    k, k_scales, v, v_scales = _buffers(held, rows, kv_heads, codes, scales)
    for r in range(rows):
        for h in range(kv_heads):
            draw_up(left[r, h], left_sums[r, h], positions[r, h], sums[r, h],
                    k[r, h], k_scales[r, h], v[r, h], v_scales[r, h])  # fmt: skip


@njit
def _out_of(at, hidden, wide, inner, eps, like):
    """A layer's weights, as the arguments of `block.out_of`."""
    return (_linear(at, 12, hidden, wide, like), _vector(at[15], hidden), eps,
            _linear(at, 16, inner, hidden, like), _linear(at, 19, inner, hidden, like),
            _linear(at, 22, hidden, inner, like))  # fmt: skip


@njit(nogil=True, fastmath=FAST, cache=True)
def layers(code, x, weights, held, like, codes, scales, scaling, eps, inner, cos, sin, q, k, v, norm, head,
           said, room, none, split, parts, out, goes, tables, rules, masks, notes, gained, keys, team,
           leads):  # fmt: skip
    """x `[rows, hidden]`, the input of the first layer, is overwritten; said `[rows, vocabulary]` receives
    the logits.

    code: the addresses of `block.into`, the kernel, `cpu.merge`, `block.out_of` and `block.logits`; like: an
    empty array of the weights' kind, codes and scales: empty ones `[.., .., .., width]` of the cache's kinds;
    scaling `[layers]`; inner: the MLP's size; none: no new token, as the kernel takes it; split: tokens of a
    split; out `[rows * kv_heads, share, head_dim]`: room for what a layer attended to. goes: the rule of
    eviction (0: no eviction); tables, rules: see above; masks, notes, gained, keys: room for a layer's mask,
    its scores, the attention that tokens received, and `leave`. For the other arguments see `block.into`,
    `block.logits` and the kernel (`cpu.compiled`). Returns the number of the layer whose format refuses the
    new token, or -1."""
    rows, hidden = x.shape
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[3]
    wide, narrow, share = heads * head_dim, kv_heads * head_dim, heads // kv_heads
    attended, shared = out.reshape(rows, wide), team.shape[0] > 0
    for i in range(len(weights)):
        at, ours = weights[i], team[i * COUNTERS : (i + 1) * COUNTERS]
        if i:
            before = _out_of(weights[i - 1], hidden, wide, inner, eps, like)
            _do(code[3], (attended, x, *before, room, ours, leads))
        _do(code[0], (x, _vector(at[0], hidden), eps, _linear(at, 1, wide, hidden, like),
                      _linear(at, 4, narrow, hidden, like), _linear(at, 7, narrow, hidden, like),
                      _vector(at[10], head_dim), _vector(at[11], head_dim), cos, sin, q, k, v, room, ours,
                      leads))  # fmt: skip
        count = held[i, 5]
        watched, there = count if goes in (SUM, NEWEST) else 0, count if goes else 0
        noted = notes[: rows * heads * watched].reshape(rows * kv_heads, share, watched)
        received = gained[: rows * kv_heads * watched].reshape(rows * kv_heads, watched)
        mask = masks[: rows * kv_heads * there].reshape(rows, kv_heads, there)
        if goes and leads:
            _found(_slots(tables[i], 0, rows, kv_heads, count - 1, False)[0], mask)
        buffers = (*_buffers(held[i], rows, kv_heads, codes, scales), mask)
        splits = (count + split - 1) // split
        items = rows * kv_heads * splits
        some = parts[:items]
        if leads:
            now = 0 if shared else items  # the new token is written before others look
            if not _ask(code[1], (q, scaling[i], k, v, *buffers, count, 0, now, some, out, noted, received)):
                return i
        if shared:
            size = max(1, SHARE // (2 * head_dim * min(count, split)))
            if leads:
                due(ours, (items + size - 1) // size)
            if not opened(ours, ATTENTION, leads):
                return -1
            first = taken(ours, SPLITS, size, items)
            while first < items:
                end = min(first + size, items)
                _ask(code[1], (q, scaling[i], none, none, *buffers, count, first, end, some, out, noted,
                               received))  # fmt: skip
                done(ours)
                first = taken(ours, SPLITS, size, items)
            if leads:
                joined(ours)
                splits_of = some.reshape(rows * kv_heads, splits, share, head_dim + 2)
                _do(code[2], (splits_of, out, noted, received))
        if goes and leads:
            _leave(goes, tables[i], rules[i], received, keys, rows, kv_heads, count)
    ours = team[len(weights) * COUNTERS :]
    before = _out_of(weights[-1], hidden, wide, inner, eps, like)
    _do(code[4], (attended, x, *before, norm, head, said, room, ours, leads))
    if goes and leads:
        for i in range(len(weights)):
            if tables[i, 6]:
                _draw_up(goes, tables[i], held[i], rows, kv_heads, codes, scales)
    return -1
