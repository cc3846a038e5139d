"""Kinds: what transformers itself would cache in every layer of a model."""

from __future__ import annotations


def layers_of(model) -> list:
    """The layers of transformers' own cache for this model, empty."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config).layers


def windows(model) -> list[int | None]:
    """The sliding window or chunk of every layer, None where it attends to everything."""
    return [getattr(layer, "sliding_window", None) for layer in layers_of(model)]
