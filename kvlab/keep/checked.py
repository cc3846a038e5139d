"""Checked: validates what a keep returns before it is used, since compiled code does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NoReturn

import torch
from torch import Tensor

from .. import late
from ..parameters import check_kind, check_whole, shown
from ..telling import is_ours

MOST = 2**32  # tokens: more than any limit


def inherits(keep) -> None:
    """ValueError for a class that inherits how another observes or scores, and takes away what that needs; or
    whose lists are none."""
    for kind in ("per_slot", "per_row", "shared", "states"):
        check_kind(f"{type(keep).__name__}.{kind}", getattr(keep, kind, ()), tuple, "names, as a tuple")
    if keep.last_queries is not None:
        check_whole(f"{type(keep).__name__}.last_queries", keep.last_queries, 1)
    chooser, once = (
        next(one for one in type(keep).__mro__ if name in vars(one)) for name in ("choose", "once")
    )
    known = "once" in vars(keep) or not is_ours(once)
    if keep.once and not known and not is_ours(chooser):
        raise ValueError(
            f"{chooser.__name__}.choose: {once.__name__} has once = True, so it would be asked after the "
            f"prompt alone; say in {chooser.__name__} whether once is True or False"
        )
    for method in ("observe", "score"):
        other = next(one for one in type(keep).__mro__ if method in vars(one))
        lost = [name for name in ("observes", "reads_queries") if vars(other).get(name) is True]
        lost = [f"{name} = True" for name in lost if not getattr(keep, name)]
        for kind in ("per_slot", "per_row", "shared"):
            lost += [f"{one!r} in {kind}" for one in getattr(other, kind) if one not in getattr(keep, kind)]
        if lost:
            name = type(keep).__name__
            raise ValueError(f"{name}: {other.__name__}.{method}, which it inherits, needs {lost[0]}")


def score(keep, layer, given) -> Tensor:
    """A keep's score, if it is valid: `[batch, kv_heads, slots]`, and no NaN for a token."""
    positions = layer.slot_positions
    _tensor(keep, "score", layer, given, positions, _every(positions))
    none = (given.isnan() & (positions >= 0)).any(-1)
    refuse = lambda: _refuse(keep, "score", layer, f"KV head {int(none.any(0).nonzero()[0])} has NaN")
    layer.state.late.settle(none, refuse, at_once=layer.in_prompt)
    return given


def state(keep, layer) -> None:
    """A keep's observations, if their shapes fit the layer: NaN shows in the score made from them."""
    shape = len(layer.lengths), layer.kv_heads, layer.slots
    if odd := layer.state.odd(*shape, numbers=False):
        _refuse(keep, "observe", layer, f"{odd}; [batch, kv_heads, slots] is {shape}")


def rule(keep, layer, given) -> Tensor:
    """The slots that a keep's rule holds, if it is a bool for every slot: `[batch, kv_heads, slots]`."""
    positions = layer.slot_positions
    return _tensor(keep, "by_rule", layer, given, positions, f"bool {_every(positions)}", (torch.bool,))


def limits(keep, layer, given) -> list[int]:
    """A keep's limits, if they are whole numbers above 0, one per row."""
    whole = isinstance(given, list) and len(given) == len(layer.lengths)
    if not (whole and all(type(most) is int and 0 < most < MOST for most in given)):
        _refuse(keep, "limits", layer, f"expected a whole number above 0 for each row, got {shown(given)}")
    return given


def shares(keep, layer, given) -> Tensor | None:
    """A keep's shares, if there are any: int `[batch, kv_heads]`, each above 0 for the newest token."""
    if given is None:
        return None
    if not keep.ragged:
        _refuse(keep, "shares", layer, "expected None of a keep that is not `ragged`")
    heads, whole = layer.slot_positions[..., 0], (torch.int32, torch.int64)
    _tensor(keep, "shares", layer, given, heads, "[batch, kv_heads] of int above 0", whole)
    if bool((given < 1).any()):
        _refuse(keep, "shares", layer, f"expected [batch, kv_heads] of int above 0, got {int(given.min())}")
    return given


def slots(keep, layer, given) -> Tensor | None:
    """The result of a method's own `choose`: None, or slots in order, the newest token's among them."""
    if given is None:
        return None
    positions = layer.slot_positions
    _tensor(keep, "choose", layer, given, positions, "int64 [batch, kv_heads, n]", (torch.int64,), axes=2)
    if late.far(given):
        return given
    before, after = given[..., :-1], given[..., 1:]
    ordered = bool(((after < 0) | ((before >= 0) & (before < after))).all())
    if not ordered or bool(((given < -1) | (given >= layer.slots)).any()):
        _refuse(keep, "choose", layer, f"expected slots below {layer.slots} in order, -1 behind them")
    last = positions.amax(-1, keepdim=True)
    there = ((positions == last).gather(2, given.clamp(min=0)) & (given >= 0)).any(-1)
    if keep.newest_stays and not (there | (last[..., 0] < 0)).all():  # a row without tokens has none
        _refuse(keep, "choose", layer, "the newest token must stay (or newest_stays be False)")
    return given


def again(keep, layer, given, model) -> Iterator[tuple]:
    """What a method's own `again` yields, as long as the model can read it: (ids, real, anything)."""
    whole, most = (torch.int32, torch.int64), model.get_input_embeddings().num_embeddings
    like, asked = layer.slot_positions[:, 0], False
    for one in given if isinstance(given, Iterable) else ():
        asked = True
        if not isinstance(one, tuple) or len(one) != 3:
            _refuse(keep, "again", layer, f"expected (ids, real, part), got {shown(one)}")
        ids, real, _ = one
        _tensor(keep, "again", layer, ids, like, f"ids of {len(like)} rows, int64 [batch, n]", whole, axes=1)
        _tensor(keep, "again", layer, real, ids, f"bool {tuple(ids.shape)}", (torch.bool,))
        if not ids.shape[1] or bool(((ids < 0) | (ids >= most)).any()):
            _refuse(keep, "again", layer, f"expected at least one token in each row, of {most}")
        yield one
    if not asked:
        _refuse(keep, "again", layer, "expected to yield (ids, real, part) at least once")


def _tensor(keep, what: str, layer, given, like: Tensor, expected: str, dtypes=None, axes=None) -> Tensor:
    """The value, if it is a tensor of real numbers with the same device and shape (in the first axes)."""
    dense = isinstance(given, Tensor) and given.layout == torch.strided
    dense = dense and not given.is_complex() and not given.is_quantized
    same = dense and given.device == like.device and given.dim() == like.dim()
    if not same or given.shape[:axes] != like.shape[:axes] or (dtypes and given.dtype not in dtypes):
        _refuse(keep, what, layer, f"expected {expected}, got {_said(given)}")
    return given


def _every(positions: Tensor) -> str:
    return f"[batch, kv_heads, slots], {tuple(positions.shape)} on {positions.device}"


def _said(x) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return " ".join(str(one).removeprefix("torch.") for one in (x.layout, x.dtype, tuple(x.shape), x.device))


def _refuse(keep, what: str, layer, why: str) -> NoReturn:
    raise ValueError(f"{type(keep).__name__}.{what}, layer {layer.index}: {why}")
