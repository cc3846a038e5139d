"""Smoothing: scale down K's outlier channels in the weights, without RoPE (SmoothQuant, Xiao et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import recorded
from ..devices import refuse_offloaded
from ..models import calibration_ids, prepare
from ..parameters import check_number
from .fold import check_foldable, projections

MARK = "kvlab_smoothed"  # in the model's config: keys come out smoothed


def factors(size: Tensor, strength: float) -> Tensor:
    """The divisor of each channel: (its size / the geometric mean of all) ^ strength.

    size: largest magnitude of every channel, `[..., head_dim]`. Channels a thousand times smaller than the
    largest count as that small.
    """
    size = size.float().clamp(min=torch.finfo(torch.float32).tiny)
    size = size.clamp(min=size.amax(-1, keepdim=True) * 1e-3).log()
    return ((size - size.mean(-1, keepdim=True)) * strength).exp()


def check_strength(strength) -> None:
    """ValueError unless it is a number from 0 to 1."""
    check_number("smooth", strength, lambda x: 0 <= x <= 1, "a strength from 0 to 1, or none")


@torch.no_grad()
def fold_smoothing(model, strength: float = 0.5, ids: Tensor | None = None):
    """Divide W_k of every layer by s and multiply W_q by it, biases included, in place; returns the model.

    The model computes the same logits up to rounding, and K comes out smoothed. ids: calibration tokens
    `[1, tokens]` (default: `models.calibration_ids`). Raises ValueError for a family with rotary embeddings,
    which rotates channels into each other behind W_k (use `Smoothed`), and for a model smoothed already.
    """
    check_strength(strength)
    check_foldable(model, ids, "smoothed in its weights", "a rotation comes between")
    if getattr(model.config, MARK, False):
        raise ValueError("model: it is smoothed already")
    refuse_offloaded(model, "fold_smoothing")
    layers = recorded(prepare(model), calibration_ids(model) if ids is None else ids)
    for pairs, layer in zip(projections(model), layers, strict=True):
        s = factors(layer.keys.abs().amax((0, 2)), strength).flatten()  # [heads * head_dim]
        for query, key in pairs:
            row = s.view(-1, *[1] * (query.dim() - 1)).to(query.dtype)
            query.mul_(row)
            key.div_(row)
    setattr(model.config, MARK, True)
    return model
