"""Rehearsal: a layer's query for an input, from its own forward with an attention function that stops."""

from __future__ import annotations

import inspect
import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import recorded
from .lean import Lean, Narrow, asked, lean
from .passes import Hook, cache_name

_reporting: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> (ids of blocks, their hooks)
_one_at_a_time = threading.Lock()  # of the threads that make a model's blocks do so


def blocks_of(model) -> torch.nn.ModuleList:
    """The model's decoder layers. ValueError for a model that has no such list."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == count and any(map(_finds, module)):
            return module
    raise ValueError(f"{type(model).__name__}: no list of {count} layers that attend is found in it")


def attention_of(block) -> torch.nn.Module:
    """The attention module of a decoder layer. ValueError where it has none."""
    found = _finds(block)
    if found is None:
        raise ValueError(f"{type(block).__name__} has no attention")
    return found


def _finds(block) -> torch.nn.Module | None:
    parts = (part for part in block.modules() if part is not block)
    return next((part for part in parts if hasattr(part, "layer_idx") and hasattr(part, "is_causal")), None)


def query_of(
    model, layer: int, block_input: Tensor, rotary=None, norm: int | None = None, given: dict | None = None,
    narrow: Narrow | None = None,
) -> Tensor:  # fmt: skip
    """The query layer `layer` would ask if `block_input` `[batch, tokens, hidden]` were its input.

    The layer's own forward computes it, up to its call of the attention function, without the projections
    to K and V where they can be left out (`Lean`). rotary: the position embeddings of its kind, or None.
    norm: the layer whose norm is used (default: its own). given: what else a layer of this pass is called
    with, by name. narrow: the part of the query
    that is needed.
    Returns `[batch, heads, tokens, head_dim]`. ValueError for another layer's norm where accelerate has
    wrapped the layers.
    """
    blocks = blocks_of(model)
    given = dict(given or {}) | ({} if rotary is None else {"position_embeddings": rotary})
    normed, block = blocks[layer if norm is None else norm], blocks[layer]
    if any("forward" in vars(part) for one in (normed, block) for part in (one, attention_of(one))):
        if norm is not None:
            raise ValueError(
                "the official variants cannot rehearse in layers that are wrapped, as by accelerate"
            )
        return asked(block, (block_input,), _accepted(block, given))
    args, given = _lean(normed).arguments(block_input, _accepted(normed, given))
    return _lean(block).query(args, _accepted(attention_of(block), given), narrow)


def _lean(block) -> Lean:
    return lean(block, attention_of(block))


def _accepted(module, given: dict) -> dict:
    """What the module's forward must or may be given of this, nothing where it insists on more."""
    parameters = inspect.signature(module.forward).parameters
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {name: value for name, value in given.items() if free or name in parameters}
    if "attention_mask" in parameters:
        named.setdefault("attention_mask", None)
    return named


def report_block_inputs(model) -> None:
    """Let every block's input reach the next layer of the cache in use (`KVCache.speculate`). The first time
    one token passes, to see which blocks are given the same position embeddings."""
    with _one_at_a_time:
        blocks = blocks_of(model)
        known, hooks = _reporting.get(model, (None, []))
        if known == [*map(id, blocks)]:
            return
        for hook in hooks:  # blocks were taken out, or put in
            hook.remove()
        reports = _Reports(weakref.ref(model), _lenders(model, blocks), cache_name(model))
        hooks = [
            block.register_forward_pre_hook(_Report(reports, index), with_kwargs=True)
            for index, block in enumerate(blocks)
        ]
        _reporting[model] = [*map(id, blocks)], hooks


def _lenders(model, blocks) -> list[int]:
    """For every block the last one before it that is given the same object as position embeddings, and so has
    it already (-1: none)."""
    given: list = []
    here = threading.get_ident()

    def note(block, args, kwargs) -> None:
        if threading.get_ident() == here:  # others may use the model meanwhile
            given.append(kwargs.get("position_embeddings"))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        recorded(model, torch.zeros(1, 1, dtype=torch.long, device="cpu"))
    finally:
        for hook in hooks:
            hook.remove()
    if len(given) != len(blocks):
        raise ValueError(
            f"{type(model).__name__}: {len(given)} of {len(blocks)} layers were called in a pass"
        )
    return [max((at for at in range(i) if given[at] is given[i]), default=-1) for i in range(len(blocks))]


class _Reports(threading.local):
    """What the blocks of a model are given in the pass that runs, in each thread by itself: their position
    embeddings, by block. lenders: see `_lenders`."""

    def __init__(self, model: weakref.ref, lenders: list[int], named: str):
        self.model, self.lenders, self.named = model, lenders, named  # of which each thread keeps a copy
        self.now: list = []

    def note(self, index: int, embeddings) -> None:
        if index == 0:
            self.now = []
        self.now.append(embeddings)
        if index + 1 == len(self.lenders):
            self.now = []


class _Report(Hook):
    """A forward pre-hook of block i - 1: offers the block's input to layer i of the kvlab cache in use."""

    def __init__(self, reports: _Reports, index: int):
        self.reports, self.index = reports, index

    def __call__(self, block, args, kwargs) -> None:
        reports, following = self.reports, self.index + 1
        cache = next((v for v in (*args[1:], *kwargs.values()) if hasattr(v, "speculate")), None)
        if cache is None or cache.model is not reports.model():  # a trace, or a model that shares this block
            return
        reports.note(self.index, kwargs.get("position_embeddings"))
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] != 1 or following >= len(reports.lenders) or reports.lenders[following] < 0:
            return
        rotary = reports.now[reports.lenders[following]]
        given = {name: v for name, v in kwargs.items() if v is not cache and name != "hidden_states"}
        if not hasattr(cache.layers[following], "conv_states"):
            given[reports.named] = _Probe(cache)
        cache.speculate(following, Rehearsal(reports.model(), following, hidden, rotary, given))


@dataclass(frozen=True)
class Rehearsal:
    """The query of a layer for the input of the block before it (see `query_of`)."""

    model: torch.nn.Module
    layer: int
    hidden: Tensor
    rotary: tuple | None
    given: dict

    def __call__(self, norm: int | None = None, narrow: Narrow | None = None) -> Tensor:
        return query_of(self.model, self.layer, self.hidden, self.rotary, norm, self.given, narrow)


class _Probe:
    """Takes the place of the cache while a layer rehearses: nothing is written."""

    def __init__(self, cache):
        self.get_seq_length = cache.get_seq_length

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs):
        return keys, values
