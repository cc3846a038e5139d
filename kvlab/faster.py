"""Faster: the only link to compiled code, which is in `kvlab/fast/`; no other file imports it.

Without that folder, or without numba, the answer is None, and the plain code does everything.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def lodger():
    """`kvlab.fast`, or None."""
    try:
        from . import fast
    except ImportError:
        return None
    return fast


def step(layer, given) -> Tensor | None:
    """The output of a later pass of a layer `[batch, heads, 1, head_dim]`, if compiled code has done all of
    it: it has written the new token, and told the layer (`Layer.taken`). given: `Recorded`. None: nothing has
    changed."""
    fast = lodger()
    return None if fast is None else fast.step(layer, given)


def attention(query: Tensor, held, scaling: float, allowed: Tensor | None, observes: bool):
    """(Output, what tokens received or None) as `attention.attend` has them, of one query over the tokens
    held (a store or a `Packed`), read in stored form; None if nothing here can."""
    fast = lodger()
    if fast is None or not fast.fits(held, query, observes):
        return None
    shape = len(query), held.keys[0].shape[1], held.length
    received = query.new_empty(shape, dtype=torch.float32) if observes else None
    return fast.attend_packed(query, held, scaling, allowed, received), received


def compiled(model, weights: str = "fp32"):
    """See `fast.compiled.compiled`. ValueError without a compiled engine."""
    if lodger() is None:
        raise ValueError("engine='compiled': kvlab.fast is not there; expected 'eager'")
    from .fast.compiled import compiled

    return compiled(model, weights)


def graphed(model):
    """See `fast.graph.graphed`. ValueError without a graph engine."""
    if lodger() is None:
        raise ValueError("engine='graph': kvlab.fast is not there; expected 'eager'")
    from .fast.graph import graphed

    return graphed(model)


def engine_of(model, rows: int = 1) -> str:
    """The engine that a model decodes with, and more: see `fast.compiled.engine_of`."""
    if lodger() is None:
        return "eager"
    from .fast.compiled import engine_of

    return engine_of(model, rows)


def gather():
    """A function that reads rows of pinned host memory from a GPU (`fast/zero_copy.py`); None without
    Triton."""
    try:
        from .fast.zero_copy import gather
    except ImportError:
        return None
    return gather
