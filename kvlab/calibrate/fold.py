"""Fold: write the skewing into W_q and W_k permanently (InfiniGen, Lee et al. 2024, offline step)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from ..devices import refuse_offloaded
from ..models.shape import ModelShape, check_ids, check_model
from .skew import skew

MARK = "kvlab_skewed"  # in the model's config: queries and keys come out skewed
FOLDABLE = ("opt", "gpt2")  # families whose queries and keys are not rotated by position after the projection


def fold(model, ids: Tensor | None = None):
    """Multiply W_q and W_k of every head, biases included, by the head's skewing matrix A, in place.

    (Q A)(K A)^T = Q K^T, so the model computes the same logits up to rounding, InfiniGen need not rotate at
    run time, and `save_pretrained` writes a skewed checkpoint (its config says so).
    ids: calibration tokens `[1, tokens]`, by default those of `models.calibration_ids`. Returns the model.
    Raises ValueError for a family with rotary embeddings, where A must follow the rotation, and for a model
    that is folded already.
    """
    check_foldable(model, ids, "folded", "A follows the rotation")
    if is_folded(model):
        raise ValueError("model: it is folded already")
    refuse_offloaded(model, "fold")
    matrices = skew(model, None if ids is None else ids.tolist())
    for pairs, matrix in zip(projections(model), matrices, strict=True):
        for rows in chain(*pairs):
            _turn(rows, matrix)
    setattr(model.config, MARK, True)
    return model


def check_foldable(model, ids: Tensor | None, changed: str, why: str) -> None:
    """TypeError or ValueError for an object that is no model, a model whose W_q and W_k cannot be folded, and
    calibration tokens outside its vocabulary."""
    check_model(model)
    if ids is not None:
        check_ids(ids, ModelShape.of(model).vocabulary)
    kind = model.config.model_type
    if kind not in FOLDABLE:
        raise ValueError(f"model: {kind!r} cannot be {changed}, only {' and '.join(FOLDABLE)}: {why}")


def projections(model) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The projections to Q and to K in every layer of a foldable model: views `[heads * head_dim, ...]` of
    the weights, then of the biases, where it has some."""
    if model.config.model_type == "opt":  # x W^T + b
        for block in model.model.decoder.layers:
            query, key = block.self_attn.q_proj, block.self_attn.k_proj
            biases = [] if query.bias is None else [(query.bias.detach(), key.bias.detach())]
            yield [(query.weight.detach(), key.weight.detach()), *biases]
    else:  # one matrix for q, k and v: x W + b
        for block in model.transformer.h:
            both = block.attn.c_attn.weight.detach().T, block.attn.c_attn.bias.detach()
            yield [part.chunk(3)[:2] for part in both]


def is_folded(model) -> bool:
    """Whether the model's queries and keys come out skewed."""
    return bool(getattr(model.config, MARK, False))


def query_projection(model, layer: int) -> nn.Linear | None:
    """A folded model's projection to the queries of a layer, None where the model is not folded, or where
    one matrix makes Q, K and V."""
    if not is_folded(model) or model.config.model_type != "opt":
        return None
    return model.model.decoder.layers[layer].self_attn.q_proj


def _turn(rows: Tensor, matrix: Tensor) -> None:
    """Replace a projection `[heads * head_dim, ...]` to Q or K by the one to Q A or K A."""
    heads = rows.reshape(*matrix.shape[:2], -1)
    turned = matrix.to(rows.device).double().transpose(1, 2) @ heads.double()
    rows.copy_(turned.reshape(rows.shape))
