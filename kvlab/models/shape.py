"""ModelShape: a model's numbers for formulas, caches and kernels; and the kinds of its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module

from ..devices import check_loaded
from ..errors import kind_and_line
from ..foreign import FOREIGN
from ..parameters import check_kind
from .passes import cache_name


def other_model(made_for) -> str:
    """Why a cache serves no other model than the one it was made for (None: that one is gone)."""
    name = "model that is gone" if made_for is None else f"model, a {type(made_for).__name__}"
    return f"this cache was made for another {name}: kvlab.make_cache(model, ...) makes one for this model"


def forgetful(model) -> str:
    """Why a prompt cannot come in pieces."""
    return (
        f"{type(model).__name__} forgets its text at a later pass of several tokens, in transformers' own "
        "cache too: feed the prompt in one pass, and what follows token by token"
    )


WRAPPERS = {"get_base_model": "get_base_model()", "_orig_mod": "_orig_mod", "module": "module"}


def check_model(model) -> None:
    """TypeError for an object that is no model of transformers; for a wrapper, with the way to the model
    inside. ValueError for a model without weights."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        check_loaded(model)
        return
    for name, way in WRAPPERS.items():  # PEFT's, torch.compile's, DataParallel's
        if isinstance(model, Module) and hasattr(model, name):
            raise TypeError(
                f"model is a {type(model).__name__} around another: give kvlab what is inside, model.{way}"
            )
    check_kind("model", model, PreTrainedModel, "a model of transformers")


def taken_out(seen: list[int]) -> str:
    """Why a cache cannot go on whose layers that attend have seen so many tokens each."""
    other = next(index for index, tokens in enumerate(seen) if tokens != seen[0])
    return (
        f"layer 0 saw {seen[0]} tokens, layer {other} {seen[other]}: where layers were taken out of a model, "
        "set config.num_hidden_layers and each attention's layer_idx before make_cache"
    )


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape, by one set of names for all families.

    head_dim: of a KV head (default: hidden / heads). value_dim: of its V (default: head_dim). vocabulary:
    token ids. context: tokens that the model was trained for, None where it does not say.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int = 0
    head_dim: int = 0
    context: int | None = None
    value_dim: int = 0

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    def __getitem__(self, axis):
        """What an attention function that is not kvlab's asks a cache's layer for: a shape of keys."""
        raise ValueError(FOREIGN)

    @classmethod
    def of(cls, model) -> ModelShape:
        """The shape of a transformers model, from its configuration."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            vocabulary=config.vocab_size,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context=getattr(config, "max_position_embeddings", None),
            value_dim=getattr(config, "v_head_dim", None) or 0,
        )


def check_ids(ids, vocabulary: int) -> None:
    """TypeError or ValueError for what are no token ids `[batch, tokens]` of so many."""
    check_kind("input_ids", ids, Tensor, "a tensor [batch, tokens]")
    if not _dense(ids) or ids.dtype not in (torch.int64, torch.int32):
        kind = "nested" if ids.is_nested else f"{ids.layout} {ids.dtype} on {ids.device}"
        raise ValueError(f"input_ids is {kind}: expected whole numbers, torch.strided of int64 or int32")
    if ids.dim() != 2 or ids.shape[0] == 0 or ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {tuple(ids.shape)}: expected [batch, tokens], not empty")
    least, most = (int(x) for x in ids.aminmax())
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise ValueError(f"input_ids: {wrong} is none of the model's {vocabulary} token ids")


def check_mask(mask, ids: Tensor) -> None:
    """TypeError or ValueError for what does not say of every token in `ids` whether it is real."""
    check_kind("attention_mask", mask, Tensor, "a tensor [batch, tokens] or none")
    if not _dense(mask):
        raise ValueError("attention_mask is sparse, nested or on meta: expected a strided tensor")
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    if bool((mask != mask.bool()).any()):
        raise ValueError("attention_mask: expected 1 for real tokens and 0 for padding, and nothing else")


def _dense(x: Tensor) -> bool:
    """Whether all numbers of a tensor are there, one after the other."""
    return x.layout == torch.strided and not x.is_nested and not x.is_meta


def layers_of(model) -> list:
    """The layers of transformers' own cache for this model, empty."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config).layers


def is_latent(model) -> bool:
    """Whether attention caches latents and computes K and V from them after the cache (MLA)."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def refusal(model) -> str | None:
    """Why kvlab's caches cannot serve a model that attends through kvlab: one line, or None."""
    if why := refused_layers(model.config):
        return why
    if cache_name(model) is None:
        return "it takes no cache of keys and values"
    return None


def refused_layers(config) -> str | None:
    """Why kvlab's caches cannot serve the layers that a configuration names: one line, or None."""
    from transformers import cache_utils as known

    kinds = (
        known.DynamicLayer, known.DynamicSlidingWindowLayer, known.LinearAttentionLayer, known.DummyLayer,
        known.LinearAttentionAndFullAttentionLayer, known.LinearAttentionAndSlidingWindowAttentionLayer,
    )  # fmt: skip
    try:
        layers = known.DynamicCache(config=config).layers
    except Exception as error:  # a model of several models, or with a cache of its own
        return f"transformers makes no cache from its configuration alone ({kind_and_line(error)})"
    if not any(isinstance(layer, known.DynamicLayer) for layer in layers):
        return "no layer of it holds keys and values"
    for layer in layers:
        if type(layer) not in kinds:
            return f"it caches in a {type(layer).__name__}, which kvlab does not know"
    text = config.get_text_config(decoder=True)
    if getattr(text, "num_kv_shared_layers", 0):
        return "it shares keys and values between layers in a way of its own"
    if getattr(text, "is_heterogeneous", False):
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        if len({tuple(getattr(one, name, None) for name in names) for one in text.per_layer_config}) > 1:
            return "it has heads of its own, in number or size, in some layers"
    return None
