"""Smoothing: take the size of K's outlier channels out of it, in the weights where nothing rotates
(SmoothQuant, Xiao et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import recorded
from ..devices import refuse_offloaded
from ..models import calibration_ids, prepare
from ..models.shape import ModelShape, check_ids, check_model
from ..parameters import shown

MARK = "kvlab_smoothed"  # in the model's config: keys come out smoothed
FOLDABLE = ("opt", "gpt2")  # families whose queries and keys are not rotated by position after the projection


def factors(size: Tensor, strength: float) -> Tensor:
    """What each channel is divided by: (its size / the geometric mean of all) ^ strength.

    size: largest magnitude of every channel, `[..., head_dim]`. Channels a thousand times smaller than the
    largest count as that small.
    """
    size = size.float().clamp(min=torch.finfo(torch.float32).tiny)
    size = size.clamp(min=size.amax(-1, keepdim=True) * 1e-3).log()
    return ((size - size.mean(-1, keepdim=True)) * strength).exp()


def check_strength(strength) -> float:
    """ValueError unless it is a number from 0 to 1."""
    if isinstance(strength, bool) or not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise ValueError(f"smooth={shown(strength)}: expected a strength from 0 to 1, or none")
    return float(strength)


@torch.no_grad()
def fold_smoothing(model, strength: float = 0.5, ids: Tensor | None = None):
    """Divide W_k of every layer by s and multiply W_q by it, biases included, in place; returns the model.

    The model computes the same logits up to rounding, and K comes out smoothed. ids: calibration tokens
    `[1, tokens]` (default: `models.calibration_ids`). Raises ValueError for a family with rotary embeddings,
    which rotates channels into each other behind W_k (use `Smoothed`), and for a model smoothed already.
    """
    check_model(model)
    if ids is not None:
        check_ids(ids, ModelShape.of(model).vocabulary)
    kind, strength = model.config.model_type, check_strength(strength)
    if kind not in FOLDABLE:
        raise ValueError(
            f"model: {kind!r} cannot be smoothed in its weights, only {' and '.join(FOLDABLE)}: a rotation "
            "stands between"
        )
    if getattr(model.config, MARK, False):
        raise ValueError("model: it is smoothed already")
    refuse_offloaded(model, "fold_smoothing")
    layers = recorded(prepare(model), calibration_ids(model) if ids is None else ids)
    blocks = model.model.decoder.layers if kind == "opt" else model.transformer.h
    for block, layer in zip(blocks, layers, strict=True):
        s = factors(layer.keys.abs().amax((0, 2)), strength).flatten()  # [heads * head_dim]
        if kind == "opt":
            queries, keys = block.self_attn.q_proj, block.self_attn.k_proj
            pairs = [(queries.weight, keys.weight), (queries.bias, keys.bias)]
        else:  # one matrix for q, k and v: x W + b
            both, hidden = block.attn.c_attn, block.attn.embed_dim
            pairs = [
                (part[..., :hidden].T, part[..., hidden : 2 * hidden].T)
                for part in (both.weight, both.bias[None])
            ]
        for query, key in pairs:
            if query is not None:
                row = s.view(-1, *[1] * (query.dim() - 1)).to(query.dtype)
                query.mul_(row)
                key.div_(row)
    setattr(model.config, MARK, True)
    return model
