"""Known: the facts about keeps, stores and formats that compiled code needs, by their class.

A subclass of one of these may behave differently, so it is not known and uses the plain code.
"""

from __future__ import annotations

import torch

from ..keep import H2O, TOVA, Sinks
from ..keep.base import Keep
from ..place.device import DeviceState
from ..store.codebook import Codebook
from ..store.exact import Exact
from ..store.float4 import Float4
from ..store.float8 import Float8
from ..store.growing import GrowingState, Packed
from ..store.int import Int
from ..store.kivi import KiviState
from ..store.rotated import Rotated
from ..store.static import StaticState
from ..telling import is_ours


def _symmetric(form) -> bool:
    """Whether integers have an fp16 scale per token and group, and nothing else."""
    return form.symmetric and not form.scales.fixed and form.scales.dtype == torch.float16


FORMATS = {  # class -> whether kernels know what this one writes
    Exact: lambda form: True,
    Int: _symmetric,
    Float8: lambda form: form.scales is None,  # the bits are all there is
    Float4: lambda form: True,
    Codebook: lambda form: not form.sketch,
}
SUM, NEWEST, PLACE = 1, 2, 3
GOES_BY = {  # class -> how the token that goes at a step is found
    H2O: SUM,  # it has the smallest sum of what it has received (`state.received`)
    TOVA: NEWEST,  # it receives least from the newest query, mean of all heads
    Sinks: PLACE,  # it is the first by its place
}
CHOOSES = ("chosen", "choose", "ranked", "scored", "_best")  # between a score and the slots that stay


def on_device(place) -> bool:
    """Whether a place's state reads and writes all of the store, where the model computes, and does nothing
    else."""
    return type(place) is DeviceState


def coded(form):
    """The format whose codes a store holds: a rotated one's are those of the format inside."""
    return form.format if type(form) is Rotated else form


def knows(form) -> bool:
    """Whether kernels know what a format writes."""
    return type(form) in FORMATS and FORMATS[type(form)](form)


def turned(form, x, back: bool = False):
    """Vectors `[..., head_dim]` in the basis of the codes, or back from it."""
    if type(form) is not Rotated:
        return x
    return form.turn_back(x) if back else form.turn(x)


def in_blocks(store) -> bool:
    """Whether K's codes share their numbers in blocks of tokens, and some are written."""
    return type(store) is KiviState and store.written > 0


def readable(store) -> bool:
    """Whether kernels know what a store, or a part of one, holds."""
    if in_blocks(store):
        return True
    if type(store) not in (GrowingState, StaticState, Packed) or getattr(store, "exact", None) is not None:
        return False
    forms = coded(store.format), coded(store.value_format)
    return all(map(knows, forms))


def target(store) -> tuple:
    """The buffers into which a kernel writes the next token to a store that is `readable`, of K the first
    one."""
    return store.recents if type(store) is KiviState else store.keys


def vacant(store) -> int:
    """The number of tokens that a kernel may write there: for KIVI, before the next block is written."""
    room = target(store)[0].shape[2]
    return (min(room, store.recent + store.group - 1) if type(store) is KiviState else room) - store.filled


def looked_at(layer) -> bool:
    """Whether somebody watches its passes, or reads its prompt again."""
    return any(one is not None for one in (layer.on_read, layer.timeline, layer.rereading))


def one_goes(layer, coming: int = 0) -> bool:
    """Whether the keep drops one token of every head after `coming` more tokens: the one with the lowest
    score, the newest aside."""
    keep, state = layer.keep.policy, layer.keep
    if layer.in_prompt or layer.local is not None or keep.merge or keep.prompt_only or keep.every:
        return False
    if state.shares is not None or any(getattr(type(keep), one) is not getattr(Keep, one) for one in CHOOSES):
        return False
    if not is_ours(type(state)):  # it may want to know of every slot that goes
        return False
    over = (held + coming - most for held, most in zip(layer.rows_held, state.longest, strict=True))
    return all(tokens == 1 for tokens in over)


def may_go(layer) -> tuple[int, list[int]]:
    """The first and, for each row, the last position of a token that a step may drop, by a keep in `GOES_BY`;
    `layer.lengths` are those before the step."""
    keep = layer.keep.policy
    if type(keep) is H2O:
        pairs = zip(layer.lengths, layer.keep.limits, strict=True)
        return 0, [newest - max(1, int(limit * keep.recent)) for newest, limit in pairs]
    return (keep.sinks if type(keep) is Sinks else 0), list(layer.lengths)
