"""Concentrate: write every head's W_q and W_k so that few columns carry most of its scores.

A head is its scores Q K^T, and (Q M)(K M^-T)^T = Q K^T for every invertible M: training fixes the scores
and leaves M open. The bias of K is open too: it adds one number to all scores of a query. The model does not
notice either, but InfiniGen does, since it guesses by some columns of Q and K. Of all pairs with the same
product, weight decay prefers the one that shares the singular values between W_q and W_k. A short training
with Muon ends far from it, so the export of a model without rotary positions goes there by algebra.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from eval.tasks import corpus

SEED, DOCUMENTS = 5_000_000, 32  # not those of training or evaluation


def documents() -> list[str]:
    """The texts by which the columns are weighed: facts of all kinds, and needles."""
    rng = random.Random(SEED)
    kinds = (
        lambda: corpus.recall(rng, 20),
        lambda: corpus.recall(rng, 8, "in"),
        lambda: corpus.chain(rng, 6),
        lambda: corpus.needle(rng, 15),
    )
    made = (kinds[number % len(kinds)]() for number in range(DOCUMENTS))
    return [document.text + document.answer for document in made]


@torch.no_grad()
def concentrate(model, rows: list[list[int]]):
    """Concentrate the scores of every head of an OPT model in few columns, in place, by the token ids of some
    texts; returns the model.

    Over these texts the keys have mean 0, the columns of Q are orthogonal to each other and so are those of
    K, with the same sizes, largest first. Logits are the same up to rounding. Raises ValueError for another
    family: where positions rotate Q and K after the projection, M could not pass through.
    """
    if model.config.model_type != "opt":
        raise ValueError(
            f"model: {model.config.model_type!r} has heads that cannot be concentrated, only opt has"
        )
    heads = model.config.num_attention_heads
    blocks = model.model.decoder.layers
    seen: dict[tuple[int, str], list[Tensor]] = {}
    hooks = [
        getattr(block.self_attn, name).register_forward_hook(
            lambda _module, _input, out, at=(index, name): seen.setdefault(at, []).append(out[0].double())
        )
        for index, block in enumerate(blocks)
        for name in ("q_proj", "k_proj")
    ]
    for ids in rows:
        model.base_model(torch.tensor([ids], device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    for index, block in enumerate(blocks):
        of_query, of_key = block.self_attn.q_proj, block.self_attn.k_proj
        queries, keys = (torch.cat(seen[index, name]) for name in ("q_proj", "k_proj"))  # [tokens, hidden]
        of_key.bias -= keys.mean(0).to(of_key.bias)
        keys = keys - keys.mean(0)
        matrices = [
            change_of_basis(*pair) for pair in zip(queries.chunk(heads, 1), keys.chunk(heads, 1), strict=True)
        ]
        for projection, turns in zip((of_query, of_key), zip(*matrices, strict=True), strict=True):
            turn = torch.block_diag(*turns).T  # [hidden, hidden]: a block for each head
            projection.weight.copy_(turn @ projection.weight.double())
            projection.bias.copy_(turn @ projection.bias.double())
    return model


def change_of_basis(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(M, M^-T) of one head, from its queries and centred keys `[tokens, head_dim]` in fp64."""
    spread = keys.T @ keys / len(keys)
    spread += (
        1e-6 * spread.diagonal().mean() * torch.eye(len(spread), dtype=spread.dtype, device=spread.device)
    )
    values, vectors = torch.linalg.eigh(spread)
    root = vectors * values.sqrt() @ vectors.T  # keys times its inverse are white
    _, sizes, turned = torch.linalg.svd(queries @ root / len(queries) ** 0.5, full_matrices=False)
    share = sizes.clamp(min=1e-3 * sizes.mean()).sqrt()  # half of each singular value for Q, half for K
    return root @ turned.T / share, torch.linalg.solve(root, turned.T) * share
