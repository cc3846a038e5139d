"""Attention of one head, by its formula (Vaswani et al. 2017, section 3.2.1)."""

from __future__ import annotations

import torch
from torch import Tensor


def weights(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Softmax of the scaled dot products: query `[head_dim]`, keys `[tokens, head_dim]` -> `[tokens]`."""
    scores = keys @ query * scaling
    size = (scores - scores.max()).exp()
    return size / size.sum()


def attend(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """What the head returns, `[head_dim]`: the mean of the values under these weights."""
    return weights(query, keys, scaling) @ values


def part(query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """What one split of the tokens says: the weighted sum of its values `[head_dim]`, the sum of its weights,
    and its largest score, to which the weights are relative."""
    scores = keys @ query * scaling
    size = (scores - scores.max()).exp()
    return size @ values, size.sum(), scores.max()


def shares(parts: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Each split's share of the whole softmax, `[splits]`."""
    largest = max(most for _, _, most in parts)
    size = torch.stack([weight * (most - largest).exp() for _, weight, most in parts])
    return size / size.sum()


def flash_decoding(query: Tensor, keys: Tensor, values: Tensor, scaling: float, split: int) -> Tensor:
    """`attend`, with the tokens cut into splits of `split` that know nothing of each other (Dao et al. 2023):
    the mean of what each returns by itself, weighted by its share."""
    pieces = zip(keys.split(split), values.split(split), strict=True)
    parts = [part(query, some_keys, some_values, scaling) for some_keys, some_values in pieces]
    own = torch.stack([total / weight for total, weight, _ in parts])  # [splits, head_dim]
    return shares(parts) @ own
