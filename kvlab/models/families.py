"""Families: where InfiniGen finds a layer's norm and query projection, one row per model family."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .shape import ModelShape

_reporting: weakref.WeakSet = weakref.WeakSet()  # models whose blocks report their inputs


@dataclass(frozen=True)
class Family:
    """What InfiniGen must know of a model family to ask a layer's question ahead of time."""

    blocks: str  # path of the list of decoder layers
    norm: str  # the norm before attention, in a decoder layer
    attention: str  # the attention module, in a decoder layer
    query: Callable[
        [torch.nn.Module, Tensor], Tensor
    ]  # (attention, normed input) -> [batch, tokens, heads * d]


def _phi_query(attn, x):
    query = attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))
    return (attn.q_layernorm(query) if attn.qk_layernorm else query).flatten(-2)


def _neox_query(attn, x):
    return attn.query_key_value(x).unflatten(-1, (-1, 3 * attn.head_size))[..., : attn.head_size].flatten(-2)


_LLAMA = Family("model.layers", "input_layernorm", "self_attn", lambda attn, x: attn.q_proj(x))
FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Family(
        "model.layers", "input_layernorm", "self_attn",
        lambda attn, x: attn.q_norm(attn.q_proj(x).unflatten(-1, (-1, attn.head_dim))).flatten(-2),
    ),
    "phi": Family("model.layers", "input_layernorm", "self_attn", _phi_query),
    "opt": Family(
        "model.decoder.layers", "self_attn_layer_norm", "self_attn",
        lambda attn, x: attn.q_proj(x) * attn.scaling,
    ),
    "gpt2": Family(
        "transformer.h", "ln_1", "attn", lambda attn, x: attn.c_attn(x)[..., : attn.embed_dim]
    ),
    "gpt_neox": Family("gpt_neox.layers", "input_layernorm", "attention", _neox_query),
}  # fmt: skip


def family_of(model) -> Family:
    """The row of a model's family. ValueError for a family without one."""
    kind = model.config.model_type
    if kind not in FAMILIES:
        raise ValueError(f"infinigen knows no {kind!r} models; it knows {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def blocks_of(model) -> torch.nn.ModuleList:
    """The model's decoder layers. ValueError for a family without a row."""
    return model.get_submodule(family_of(model).blocks)


def query_of(model, layer: int, block_input: Tensor, rotary=None, norm: int | None = None) -> Tensor:
    """The query layer `layer` would ask if `block_input` `[batch, tokens, hidden]` were its input.

    rotary: (cos, sin), each `[batch, tokens, rotary dims]`, or None. norm: the layer whose norm is used
    (default: its own). Returns `[batch, heads, tokens, head_dim]`.
    """
    family, blocks = family_of(model), blocks_of(model)
    block, normer = blocks[layer], blocks[layer if norm is None else norm]
    post_norm = not getattr(block, "do_layer_norm_before", True)  # OPT-350m
    normed = block_input if post_norm else getattr(normer, family.norm)(block_input)
    query = family.query(getattr(block, family.attention), normed)
    query = query.unflatten(-1, (ModelShape.of(model).heads, -1)).transpose(1, 2)
    return query if rotary is None else _rotate(query, *rotary)


def report_block_inputs(model) -> None:
    """Let every block's input reach the next layer of the cache in use (`KVCache.speculate`)."""
    if model in _reporting:
        return
    _reporting.add(model)
    for index, block in enumerate(blocks_of(model)):
        block.register_forward_pre_hook(_Report(model, index + 1), with_kwargs=True)


class _Report:
    """A forward pre-hook of block i - 1: offers the block's input to layer i of the kvlab cache in use."""

    def __init__(self, model, layer: int):
        self.model, self.layer = weakref.ref(model), layer

    def __call__(self, block, args, kwargs) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.shape[1] != 1:
            return
        rotary = kwargs.get("position_embeddings")
        for value in (*args[1:], *kwargs.values()):
            if hasattr(value, "speculate") and self.layer < len(value.layers):
                value.speculate(
                    self.layer,
                    lambda norm=None: query_of(self.model(), self.layer, hidden, rotary, norm),
                )


def _rotate(query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding on the first dimensions of `[batch, heads, tokens, head_dim]`."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned, rest = query[..., : cos.shape[-1]], query[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
