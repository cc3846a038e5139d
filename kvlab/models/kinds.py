"""Kinds: what transformers itself would cache in every layer of a model."""

from __future__ import annotations

import inspect


def layers_of(model) -> list:
    """The layers of transformers' own cache for this model, empty."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config).layers


def is_latent(model) -> bool:
    """Whether attention caches what K and V are made of, and makes them after the cache (MLA)."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


def refusal(model) -> str | None:
    """Why kvlab's caches cannot serve a model that attends through kvlab: one line, or None."""
    from transformers import cache_utils as known

    kinds = (
        known.DynamicLayer, known.DynamicSlidingWindowLayer, known.LinearAttentionLayer, known.DummyLayer,
        known.LinearAttentionAndFullAttentionLayer, known.LinearAttentionAndSlidingWindowAttentionLayer,
    )  # fmt: skip
    layers = layers_of(model)
    if not any(isinstance(layer, known.DynamicLayer) for layer in layers):
        return "no layer of it holds keys and values"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "it takes no cache of keys and values"
    for layer in layers:
        if type(layer) not in kinds:
            return f"it caches in a {type(layer).__name__}, which kvlab does not know"
    if getattr(model.config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        return "it shares keys and values between layers in a way of its own"
    return None
