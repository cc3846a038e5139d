"""Checked: what a keep says, looked at once before anything acts on it: compiled code does not look."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from .. import late


def score(keep, layer, given) -> Tensor:
    """A keep's score, if it is one: `[batch, kv_heads, slots]`, and no NaN where a token is."""
    positions = layer.slot_positions
    if not isinstance(given, Tensor) or given.shape != positions.shape:
        _refuse(
            keep, "score", layer, f"expected [batch, kv_heads, slots], {_said(positions)}, got {_said(given)}"
        )
    none = (given.isnan() & (positions >= 0)).any(-1)
    refuse = lambda: _refuse(keep, "score", layer, f"KV head {int(none.any(0).nonzero()[0])} has NaN")
    if late.far(none) and not layer.in_prompt:  # a step does not wait for the answer
        layer.state.late.tell()
        layer.state.late.ask(none, refuse)
    elif none.any():
        refuse()
    return given


def limits(keep, layer, given) -> list[int]:
    """A keep's limits, if they are whole numbers above 0, one for each row."""
    whole = isinstance(given, list) and len(given) == len(layer.lengths)
    if not (whole and all(isinstance(most, int) and most > 0 for most in given)):
        _refuse(keep, "limits", layer, f"expected a whole number above 0 for each row, got {given!r}")
    return given


def shares(keep, layer, given) -> Tensor | None:
    """A keep's shares, if there are any: `[batch, kv_heads]`."""
    if given is not None and (not isinstance(given, Tensor) or given.shape != layer.slot_positions.shape[:2]):
        _refuse(keep, "shares", layer, f"expected [batch, kv_heads], got {_said(given)}")
    return given


def slots(keep, layer, given) -> Tensor | None:
    """What a `choose` of a method's own returned: None, or slots in order, the newest token's among them."""
    if given is None:
        return None
    positions = layer.slot_positions
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.shape[:2] != positions.shape[:2]:
        _refuse(keep, "choose", layer, f"expected int64 [batch, kv_heads, n], got {_said(given)}")
    if late.far(given):
        return given
    before, after = given[..., :-1], given[..., 1:]
    ordered = bool(((after < 0) | ((before >= 0) & (before < after))).all())
    if given.dim() != 3 or not ordered or bool(((given < -1) | (given >= layer.slots)).any()):
        _refuse(keep, "choose", layer, f"expected slots below {layer.slots} in order, -1 behind them")
    newest = positions == positions.amax(-1, keepdim=True)
    there = (newest.gather(2, given.clamp(min=0)) & (given >= 0)).any(-1)
    if keep.newest_stays and not there.all():
        _refuse(keep, "choose", layer, "the newest token must stay (or newest_stays be False)")
    return given


def _said(x) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _refuse(keep, what: str, layer, why: str) -> NoReturn:
    raise ValueError(f"{type(keep).__name__}.{what}, layer {layer.index}: {why}")
