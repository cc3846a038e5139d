"""Step: a decode step of one layer in one call of a kernel, with the keep's part."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..gather import in_order
from ..policy import View
from .fused import Fused
from .known import GOES_BY, SUM, looked_at, on_device, one_goes, vacant

PER_EMPTY = 64  # one of this many slots may stay empty if tokens go one by one
_made = weakref.WeakKeyDictionary()  # a layer's store -> its `Fused`, as long as its buffers are these


def made(layer) -> Fused | None:
    """The `Fused` for the next step of a layer, if the last one had it; None without room."""
    found = _made.get(layer.store)
    return found if found is not None and found.has_room(layer.store) else None


def step(layer, given) -> Tensor | None:
    """See `faster.step`: for one token of every row, where every query sees all that is held."""
    fused = _ready(layer, given)
    if fused is None:
        _made.pop(layer.store, None)
        return None
    received = (
        torch.empty(len(layer.lengths), layer.kv_heads, layer.slots + 1, dtype=torch.float32, device="cpu")
        if layer.observes
        else None
    )
    new = given.query, given.keys, given.values
    layer._busy = True
    out = fused.call(layer.store, *new, given.scaling, there(layer.table, 1), received)
    if out is not None:
        layer.taken(given.scaling)
        if not layer.settled:
            layer.given = given
            _decide(layer, received)
    layer._busy = False
    return out


def _ready(layer, given) -> Fused | None:
    query, visibility, store = given.query, given.visibility, layer.store
    if looked_at(layer) or query.shape[2] != 1 or query.device.type != "cpu":
        return None
    if given.softcap is not None or given.sinks is not None or visibility.rule is not None:
        return None
    if visibility.real(len(layer.lengths), 1, layer.seen, layer.lengths)[0] is not None:
        return None
    if layer.in_prompt or layer.local is not None or not on_device(layer.place):
        return None
    if layer.evicts and layer.keep.policy.renumber:
        return None
    if (found := made(layer)) is None:
        _made.pop(store, None)  # its buffers are let go before others are made
        found = Fused.of(store, query)
        if found is not None and not vacant(store):
            if store.max_length > -1 or (store.in_blocks and store.filled >= store.recent + store.group - 1):
                return None
            store.reserve(1 + (store.filled + 1) // PER_EMPTY if store.tight else 1)
            found = Fused.of(store, query)
        if found is not None:
            _made[store] = found
    return found


def _decide(layer, received: Tensor | None) -> None:
    """The keep's part after a step. If one token of every head goes, its slot becomes empty, and slots close
    up only now and then."""
    if layer.slots < PER_EMPTY or not one_goes(layer):
        layer.end_pass(received)
        return
    from . import closing

    keep, view, table = layer.keep.policy, View(layer, layer.keep), layer.table
    layer.observe(received)
    if not keep.observes:
        keep.observe_and_check(view, None)
    gone = torch.empty(len(layer.lengths), layer.kv_heads, dtype=torch.int64, device="cpu")
    closing.lowest(keep.scored(view).numpy(), layer.slot_positions.numpy(), gone.numpy())
    keep.forget(layer.keep)
    table.empty(gone)
    if (table.count - max(table.rows_held)) * PER_EMPTY > table.count:
        layer.let_go(in_order(table.moved >= 0), layer.keep.longest)
    layer.ended()


def there(table, new: int) -> Tensor | None:
    """Which slots hold a token, bool `[batch, 1 or kv_heads, slots + new]`, `new` more tokens in every row
    included; None: in all."""
    if table.moved is None or min(table.rows_held) == table.count:
        return None
    return torch.nn.functional.pad(table.moved >= 0, (0, new), value=True)


def way(layer) -> int | None:
    """The kind of a decode step that sees all tokens held: 0 if it adds a token and drops none, the way to
    find the token (`GOES_BY`) if it drops one of every head; None: it does more, or is observed."""
    if looked_at(layer) or made(layer) is None:
        return None
    if layer.settled:
        return 0 if there(layer.table, 0) is None else None
    keep, longest = layer.keep.policy, layer.keep.longest
    if type(keep) not in GOES_BY or keep.chunk_length > 1 or not one_goes(layer, coming=1):
        return None
    if len(set(longest)) > 1 or not layer.store.stays(longest[0], layer.store.keys[0].shape[2]):
        return None
    way = GOES_BY[type(keep)]
    if way == SUM:
        sums, shape = layer.keep.received, (len(layer.lengths), layer.kv_heads, layer.slots)
        if (sums.dtype, sums.shape) != (torch.float32, shape):
            return None
    return way
