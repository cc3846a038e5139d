"""Passes: a model tells the cache in use when a pass begins, and when it has ended."""

from __future__ import annotations

import inspect
import sys
import weakref
from itertools import chain

import torch
from torch import nn

from ..foreign import FOREIGN
from ..interface import expanding
from . import guest, own_attention
from .stamp import GLOBAL, HOOKED

NAMES = "cache", "past_key_values"  # of a forward's cache: since transformers 5.24, and before
_reporting: weakref.WeakSet = weakref.WeakSet()  # bodies that report


def bodies_of(model) -> list[nn.Module]:
    """The model and its parts that take a cache and are no blocks, each before those inside it."""
    inner = (part for part in model.children() if not isinstance(part, nn.ModuleList))
    takes = cache_name(model) is not None
    return [model] * takes + [body for part in inner for body in bodies_of(part)]


def cache_name(body) -> str | None:
    """What this body's forward calls the cache that it takes; None: it takes none."""
    taken = inspect.signature(body.forward).parameters
    return next((name for name in NAMES if name in taken), None)


def report_passes(model) -> None:
    """Let every pass reach the kvlab cache that it is given: `begin_pass(body, args, kwargs)` before anything
    is computed, then `end_pass(body, args, kwargs)`, or `leave()` where it broke off. The outermost body
    that was called speaks first."""
    for body in bodies_of(model):
        if hasattr(body, "_orig_mod"):
            raise ValueError(FOREIGN)
        if body not in _reporting:
            _reporting.add(body)
            body.register_forward_pre_hook(_Begins(), with_kwargs=True)
            body.register_forward_hook(_Ends(), with_kwargs=True, always_call=True, prepend=True)


class Hook:
    """A forward hook of kvlab's. In a copy of the model it says nothing: that gets hooks of its own."""

    def __reduce__(self):
        return Silent, ()


class Silent:
    """What a hook of kvlab's is in a copy of the model."""

    def __call__(self, *args) -> None:
        pass


def others_hooks(model) -> list:
    """Everything that is called before or after a part of the model, except kvlab's hooks."""
    tables = [vars(part)[name] for part in model.modules() for name in HOOKED]
    every = chain.from_iterable(map(dict.values, [*tables, *GLOBAL]))
    return [hook for hook in every if not isinstance(hook, Hook | Silent)]


class _Begins(Hook):
    def __call__(self, body, args, kwargs) -> None:
        cache = _cache_among(args, kwargs)
        if torch.compiler.is_dynamo_compiling():
            if cache is not None:
                raise ValueError(FOREIGN)
            return
        for value in kwargs.values() if cache is None else ():
            if hasattr(value, "cross_attention_cache") and _cache_among(vars(value).values(), {}) is not None:
                raise ValueError("the kvlab cache is inside an EncoderDecoderCache: pass the cache itself")
        if cache is not None:
            own_attention.check(body)
        guest.enter(sys._getframe(1), cache)
        expanding(None)  # what an earlier pass left behind when it broke off
        if cache is not None:
            if kwargs.get("output_attentions", getattr(body.config, "output_attentions", False)):
                raise ValueError(
                    "output_attentions: a kvlab cache returns no attention weights; pass no cache, or "
                    "transformers' own"
                )
            if body.training and getattr(body, "is_activation_checkpointing", False):
                raise ValueError(
                    "gradient checkpointing takes a cache away from the layers: call model.eval(), or pass "
                    "no cache"
                )
            cache.begin_pass(body, args, kwargs)


class _Ends(Hook):
    def __call__(self, body, args, kwargs, output) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        try:
            cache = _cache_among(args, kwargs)
            if cache is not None:
                cache.leave() if output is None else cache.end_pass(body, args, kwargs)
        finally:
            guest.leave(sys._getframe(1))


def fed_to(body, args, kwargs) -> tuple:
    """(Token ids, attention mask, position ids) that a pass through `body` was given; None: it was not."""
    given = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
    return tuple(given.get(name) for name in ("input_ids", "attention_mask", "position_ids"))


def _cache_among(args, kwargs):
    return next((value for value in (*args, *kwargs.values()) if hasattr(value, "begin_pass")), None)
