"""Reread: a finished prompt is fed to the model again, through a cache that stores nothing of it."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from .attention import Recorded
from .keep import checked
from .models import cache_name, fed_to
from .policy import View
from .visibility import own_positions

PLAIN = ("input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep", "labels")


def check_rereads(keep, cache, place) -> None:
    """ValueError for a model or a place that a second reading would change."""
    if place.on_host:
        why = "keys and values must be on the device"
    elif not cache.fillable:
        why = "the model must hold nothing but keys and values of its layers"
    else:
        return
    raise ValueError(f"{type(keep).__name__} reads the prompt again, for which {why}")


def check_fed(cache, body, args, kwargs) -> None:
    """ValueError for a pass of the prompt without token ids, or with more than these: pictures."""
    keep = type(cache.attending[0].keep.policy).__name__
    if fed_to(body, args, kwargs)[0] is None:
        raise ValueError(f"{keep} reads the prompt again, for which it needs its token ids: give input_ids")
    given = inspect.signature(body.forward).bind_partial(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    if more := [name for name, value in given.items() if name not in PLAIN and isinstance(value, Tensor)]:
        raise ValueError(f"{keep} reads the prompt again, by its token ids alone: it cannot read {more[0]}")


def note(cache, ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    """Record a pass of the prompt: its ids `[batch, tokens]`; mask `[batch, tokens so far]`, None if all are
    real; positions `[1 or batch, tokens]`, None if the model numbers them itself. They are kept in the state
    of the first layer, where forks and copies reach them."""
    state = cache.attending[0].keep
    real = torch.ones_like(ids, dtype=torch.bool)
    if state.ids is not None:
        real = torch.cat([state.real, real], 1)
        ids = torch.cat([state.ids, ids], 1)
    state.ids, state.real = ids, real if mask is None else mask[:, -real.shape[1] :].bool().clone()
    if positions is not None:
        there = state.real[:, -positions.shape[1] :]
        last = positions.expand_as(there).masked_fill(~there, -1).amax(1) + 1
        state.next = last if state.next is None else torch.maximum(state.next, last)


@torch.no_grad()
def reread(cache) -> None:
    """Feed the tokens of the keep's `again`: every layer attends, calls the keep's `hear` and writes nothing.
    Then the keep has heard all layers, and may `agree` on the share of each."""
    layers, model = cache.attending, cache.model
    state, keep = layers[0].keep, layers[0].keep.policy
    view = View(layers[0], state)
    given = keep.again(view, model, state.ids, state.real)
    for fed, real, part in given if keep.ours else checked.again(keep, view, given, model):
        for layer in layers:
            layer.rereading = (part,)
        try:
            _pass(model, cache, fed, real)
        finally:
            for layer in layers:
                layer.rereading = None
    state.ids = state.real = state.next = None
    keep.agree([View(layer, layer.keep) for layer in layers])


def _pass(model, cache, fed: Tensor, real: Tensor) -> None:
    """fed `[batch, n]` after the prompt, numbered as the prompt was; real bool `[batch, n]`: which tokens are
    no padding."""
    accepted, state = inspect.signature(model.forward).parameters, cache.attending[0].keep
    inputs = {"input_ids": fed, cache_name(model): cache, "use_cache": True}
    every = torch.cat([state.real, real], 1)
    if not bool(every.all()):
        inputs["attention_mask"] = every.long()
    if "position_ids" in accepted and state.next is not None:
        inputs["position_ids"] = state.next[:, None] + own_positions(real).clamp(min=0)
    if "logits_to_keep" in accepted:
        inputs["logits_to_keep"] = 1
    model(**inputs)


def attend_again(layer, given: Recorded) -> Tensor:
    """A layer's part in such a pass: it attends to its held tokens and the pass's own, stores nothing, and
    calls its keep's `hear`. Returns `[batch, heads, tokens, head_dim]`."""
    asked = given.visibility.positions(given.keys, layer.seen)
    before = torch.tensor(layer.lengths, device=asked.device).view(-1, 1)
    asked = torch.where(asked < 0, asked, asked + before)
    held = layer.table.positions if layer.table.moved is None else layer.table.moved
    positions = torch.cat([held, asked[:, None].expand(-1, held.shape[1], -1).to(held.dtype)], 2)
    pairs = zip(layer.store.read(given.keys.device), (given.keys, given.values), strict=True)
    keys, values = (torch.cat(pair, 2) for pair in pairs)
    given = replace(given, keys=keys, values=values)
    out, _ = given.attend_to(keys, values, given.visibility.allowed(asked, positions))
    layer.keep.policy.hear(View(layer, layer.keep), given, asked, positions, *layer.rereading)
    return out
