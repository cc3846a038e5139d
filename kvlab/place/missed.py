"""Missed: the share of the attention weight on tokens that a step did not fetch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import softmax_beside, true_scores


def missed(layer, query: Tensor, slots: Tensor) -> float:
    """For one decode step of a layer: mean over rows and query heads, from 0 (nothing) to 1.

    query `[batch, heads, 1, head_dim]`; slots `[batch, kv_heads, n]`: the slots fetched (-1: none), the
    newest token included. It reads all stored keys, and these bytes are not counted.
    """
    past = layer.store.read(query.device)[0][:, :, : layer.slots - 1]
    keys = torch.cat([past, layer.given.keys], dim=2)
    scores = true_scores(query, keys, layer.scaling, layer.slot_positions, layer.softcap)
    weights = softmax_beside(layer.sinks, scores)
    fetched = weights.new_zeros(weights.shape[0], layer.kv_heads, layer.slots + 1)
    fetched.scatter_(2, slots.to(weights.device).where(slots >= 0, layer.slots), 1.0)
    fetched[..., layer.slots - 1] = 1.0
    left = 1 - fetched[..., : layer.slots].repeat_interleave(weights.shape[1] // layer.kv_heads, dim=1)
    return float((weights * left).sum(-1).mean())
