"""ModelShape: the numbers that formulas, caches and kernels need of a model; and what its layers cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from ..errors import kind_and_line


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
        )


def layers_of(model) -> list:
    """The layers of transformers' own cache for this model, empty."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config).layers


def is_latent(model) -> bool:
    """Whether attention caches what K and V are made of, and makes them after the cache (MLA)."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def refusal(model) -> str | None:
    """Why kvlab's caches cannot serve a model that attends through kvlab: one line, or None."""
    if why := refused_layers(model.config):
        return why
    if "past_key_values" not in inspect.signature(model.forward).parameters:
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
