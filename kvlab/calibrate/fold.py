"""Fold: write the skewing into W_q and W_k, once and for all (InfiniGen, Lee et al. 2024, offline step)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..devices import refuse_offloaded
from ..models.shape import ModelShape, check_ids, check_model
from .skew import skew

MARK = "kvlab_skewed"  # in the model's config: queries and keys come out skewed
FOLDABLE = ("opt", "gpt2")  # families whose queries and keys are not rotated by position after the projection


def fold(model, ids: Tensor | None = None):
    """Multiply W_q and W_k of every head, biases included, by the head's skewing matrix A, in place.

    (Q A)(K A)^T = Q K^T, so the model computes the same logits up to rounding, InfiniGen has nothing to
    rotate at run time, and `save_pretrained` writes a checkpoint that stays skewed (its config says so).
    ids: calibration tokens `[1, tokens]`, by default those of `models.calibration_ids`. Returns the model.
    Raises ValueError for a family with rotary embeddings, where A must follow the rotation, and for a model
    that is folded already.
    """
    check_model(model)
    if ids is not None:
        check_ids(ids, ModelShape.of(model).vocabulary)
    kind = model.config.model_type
    if kind not in FOLDABLE:
        raise ValueError(
            f"model: {kind!r} cannot be folded, only {' and '.join(FOLDABLE)}: A follows the rotation"
        )
    if is_folded(model):
        raise ValueError("model: it is folded already")
    refuse_offloaded(model, "fold")
    matrices = skew(model, None if ids is None else ids.tolist())
    blocks = model.model.decoder.layers if kind == "opt" else model.transformer.h
    with torch.no_grad():
        for block, matrix in zip(blocks, matrices, strict=True):
            if kind == "opt":
                for projection in (block.self_attn.q_proj, block.self_attn.k_proj):  # x W^T + b
                    _turn(projection.weight, matrix)
                    if projection.bias is not None:
                        _turn(projection.bias, matrix)
            else:  # one matrix for q, k and v: x W + b
                projection, hidden = block.attn.c_attn, block.attn.embed_dim
                for start in (0, hidden):
                    _turn(projection.weight.data[:, start : start + hidden].T, matrix)
                    _turn(projection.bias.data[start : start + hidden], matrix)
    setattr(model.config, MARK, True)
    return model


def is_folded(model) -> bool:
    """Whether the model's queries and keys come out skewed."""
    return bool(getattr(model.config, MARK, False))


def _turn(rows: Tensor, matrix: Tensor) -> None:
    """Replace `[heads * head_dim, ...]`, what produces Q or K, by what produces Q A or K A."""
    heads = (
        rows.unflatten(0, matrix.shape[:2]).flatten(2) if rows.dim() > 1 else rows.view(*matrix.shape[:2], 1)
    )
    turned = matrix.to(rows.device).double().transpose(1, 2) @ heads.double()
    rows.copy_(turned.reshape(rows.shape))
