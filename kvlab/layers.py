"""Layers: those of a cache for a model, ours for K and V, transformers' own for other states."""

from __future__ import annotations

from dataclasses import replace

from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin

from .hybrid import HybridLayer
from .latent import LatentLayer, shape_of_latents
from .layer import Layer
from .models import ModelShape, is_latent, layers_of
from .parameters import shown


def make_layers(model, keep, store, place) -> list:
    """ValueError for policies that do not fit the model's cached tensors."""
    layers = layers_of(model)
    attending = [index for index, theirs in enumerate(layers) if isinstance(theirs, DynamicLayer)]
    shape, kind = replace(ModelShape.of(model), layers=len(attending)), Layer
    if is_latent(model):
        shape, kind = shape_of_latents(model, shape, keep, place), LatentLayer
    for order, index in enumerate(attending):
        theirs = layers[index]
        local = getattr(theirs, "sliding_window", None)
        if local is not None and (type(local) is not int or not 1 <= local < 2**31):
            raise ValueError(f"sliding_window={shown(local)} in layer {index}: expected 1 to 2**31 - 1")
        given = index, order, (keep, store, place), shape, model, local
        if isinstance(theirs, LinearAttentionCacheLayerMixin):
            layers[index] = HybridLayer(theirs.number_of_states, *given)
        else:
            layers[index] = kind(*given)
    return layers
