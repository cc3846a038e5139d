"""Guest: a model attends through kvlab in passes with a kvlab cache, and otherwise as before.

transformers looks up in a model's configuration how its layers attend, at every pass. The configurations of a
prepared model answer "kvlab" while such a pass runs in this thread, else what they hold.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from functools import cache
from types import FrameType

import torch

from ..attention import always
from ..interface import NAME

# The running pass: (the frame of its call, the id of its kvlab cache or None, the pass around it). A pass may
# break off silently, as by Ctrl-C: so the test is whether its frame still runs.
_pass: ContextVar[tuple | None] = ContextVar("kvlab_pass", default=None)


def enter(frame: FrameType, cache) -> None:
    """A pass begins whose call has this frame; cache: kvlab's, or None."""
    _pass.set((frame, None if cache is None else id(cache), _running()))


def leave(frame: FrameType) -> None:
    """It has come through, or is over, and nothing of it is held."""
    now = _pass.get()
    _pass.set(now[2] if now is not None and now[0] is frame else _running())


def _running() -> tuple | None:
    """The innermost pass that runs."""
    now = _pass.get()
    while now is not None and not _runs(now[0]):
        now = now[2]
    return now


def _runs(frame: FrameType) -> bool:
    """Whether this call is among those that led here."""
    caller = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None


def attends() -> bool:
    """Whether the pass that runs attends through kvlab."""
    if always.get():
        return True
    return _pass.get() is not None and (now := _running()) is not None and now[1] is not None


def inside(cache) -> bool:
    """Whether a pass with this cache runs in this thread: a hook, or a signal handler, asks."""
    now = _running()
    while now is not None and not (now[1] == id(cache) and _runs(now[0])):
        now = now[2]
    return now is not None


def check_outside(cache) -> None:
    """RuntimeError while a pass with this cache runs in this thread."""
    if inside(cache):
        raise RuntimeError("a pass through this cache is running: change or copy it when it has ended")


def answer(config) -> None:
    """Let a configuration answer so. It stays the same object; its copies and its saved form are
    unchanged."""
    if not issubclass(type(config), _Answers):
        object.__setattr__(config, "__class__", _answering(type(config)))


class _Answers:
    """What `answer` makes of a configuration's class."""


@cache
def _answering(kind: type) -> type:
    own = kind._attn_implementation

    def attn_implementation(config):
        if not torch.compiler.is_dynamo_compiling() and attends():
            return NAME
        return own.fget(config)

    def reduce(config, protocol):
        make, (_, *others), *state = kind.__reduce_ex__(config, protocol)
        return make, (kind, *others), *state

    inside = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__init__": kind.__init__,
        "__eq__": kind.__eq__,
        "__hash__": kind.__hash__,
        "__class__": property(lambda config: kind),
        "__reduce_ex__": reduce,
        "_attn_implementation": property(attn_implementation, own.fset),
    }
    return type(kind.__name__, (_Answers, kind), inside)
