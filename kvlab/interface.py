"""Interface: the functions that transformers calls in a pass that carries one of our caches.

Between `past_key_values.update(...)` and the attention function the models of transformers do nothing with
K and V. So `KVCache.update` returns the layer object itself instead of both, and the function registered here
calls its `attend`. `models/guest.py` sends a model here, only in the passes that need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
from torch import Tensor

from .attention import Recorded, attending, records, while_set
from .modes import keeping
from .visibility import CAUSAL, Visibility

NAME = "kvlab"


def kvlab_attention(
    module, query, key, value, attention_mask, *, scaling=None, softcap=None, s_aux=None, dropout=0.0,
    **kwargs,
):  # fmt: skip
    """The attention function of transformers' AttentionInterface.

    query `[batch, heads, queries, head_dim]`; key and value are a kvlab cache layer, or tensors
    `[batch, kv_heads, tokens, head_dim]` when there is none; attention_mask is the result of `Visibility.of`,
    a padding mask `[batch, tokens seen]` or None; without a kvlab cache also a finished mask `[batch, 1,
    queries, tokens]`. softcap: scores become softcap * tanh(score / softcap). s_aux `[heads]`: an additional
    score, which takes its share of the weight and has no value.
    Returns (out `[batch, queries, heads, head_dim]`, None). ValueError for dropout with a cache, and for
    numbers under another keyword, such as a cap by another name; backward through a cache's output raises
    RuntimeError, since a cache keeps no graph.
    """
    if unknown := [name for name, value in kwargs.items() if _real(value)]:
        raise ValueError(
            f"{type(module).__name__} hands its attention {unknown[0]}, a number that kvlab does not know"
        )
    if _stops.get():
        raise Asked(query)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    visibility, latent = CAUSAL if attention_mask is None else attention_mask, waiting(module)
    if isinstance(visibility, Tensor):
        if visibility.dim() != 2:
            shape = tuple(visibility.shape)
            raise ValueError(f"attention_mask has shape {shape}: expected a padding mask [batch, tokens]")
        visibility = Visibility(visibility)
    if latent is None and isinstance(key, Tensor):
        given = Recorded(query, key, value, visibility, scaling, softcap, s_aux)
        if not visibility.known or query.shape[2] != key.shape[2]:
            raise ValueError(f"{type(module).__name__} attends in a way of its own, which cannot be recorded")
        if (found := records.get()) is not None:
            found.append(given)
        out, _ = given.attend()
        return out.transpose(1, 2).contiguous(), None
    if not getattr(module, "is_causal", True):
        raise ValueError(
            f"{type(module).__name__}.is_causal is False: a kvlab cache is for attention to earlier tokens"
        )
    if dropout:
        raise ValueError(
            f"attention dropout of {dropout}: a kvlab cache serves a model in eval mode; call model.eval()"
        )
    with keeping():
        given = query, visibility, scaling, softcap, s_aux
        out = key.attend(*given) if latent is None else latent.attend(*given, (key, value))
        out = out.transpose(1, 2).contiguous()
    return (_NoGraph.apply(out, query) if query.requires_grad else out), None


def _real(value) -> bool:
    """Whether it could change a score: a number other than a count, or a tensor of such numbers."""
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


class _NoGraph(torch.autograd.Function):
    """A cache's output in a pass that builds a graph: backward through it is refused."""

    @staticmethod
    def forward(context, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(context, gradient: Tensor):
        raise RuntimeError(
            "a kvlab cache keeps numbers and no graph, so no gradient goes through it: pass no cache, or "
            "transformers' DynamicCache"
        )


class Asked(Exception):
    """Ends a forward once `args[0]` is known."""


_stops: ContextVar[bool] = ContextVar("kvlab_stops", default=False)


@contextmanager
def stopping() -> Iterator[None]:
    """Inside this block, the attention function does not attend but raises `Asked(query)`."""
    with attending(), while_set(_stops, True):
        yield


_expanding: ContextVar = ContextVar("kvlab_expanding", default=None)  # a latent layer that waits for K and V
# The visibility of the running pass, for a layer that needs it before it attends.
latest: ContextVar[Visibility] = ContextVar("kvlab_visibility", default=CAUSAL)


def _told(**said) -> Visibility:
    """The function of AttentionMaskInterface, which transformers asks before the first layer."""
    visibility = Visibility.of(**said)
    latest.set(visibility)
    if (found := _all_told.get()) is not None:
        found.append(visibility)
    return visibility


_all_told: ContextVar[list[Visibility] | None] = ContextVar("kvlab_all_told", default=None)


@contextmanager
def told() -> Iterator[list[Visibility]]:
    """Record every mask that transformers asks for inside this block: yields the list."""
    with attending(), while_set(_all_told, []) as found:
        yield found


def expanding(layer) -> None:
    """A latent layer has returned numbers: its model's next call of the attention function uses them. None:
    no layer waits, since a pass begins."""
    _expanding.set(layer)


def waiting(module):
    """The latent layer that waits for the K and V of this attention module, or None."""
    latent = _expanding.get()
    if latent is None:
        return None
    _expanding.set(None)
    return latent if latent.serves(module) else None


@cache
def register() -> None:
    """Enter both functions into transformers' interfaces, whose import brings the modelling code along."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, kvlab_attention)
    AttentionMaskInterface.register(NAME, _told)
