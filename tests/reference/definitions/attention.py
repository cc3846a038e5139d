"""Attention of a prompt over itself, by its definition; of one query it is in `kvlab.reference`."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.reference.attention import attend, weights

__all__ = ["attend", "causal", "flash", "group_weights", "kv_head", "received", "seen", "weights"]


def seen(at: int, window: int | None = None) -> list[int]:
    """Positions that the query at position `at` may see: itself and those before, `window` in all."""
    return [position for position in range(at + 1) if window is None or at - position < window]


def causal(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window=None) -> Tensor:
    """A prompt that attends to itself, `[tokens, head_dim]` each -> same."""
    found = []
    for at, query in enumerate(queries):
        over = seen(at, window)
        found.append(attend(query, keys[over], values[over], scaling))
    return torch.stack(found)


def flash(queries: Tensor, keys: Tensor, values: Tensor, scaling: float, block: int, bias=None) -> Tensor:
    """`causal` in blocks of queries and of keys (Dao et al. 2022): of all scores one block is held at a time.
    bias `[tokens, tokens]` is added to them."""
    found = []
    for rows in torch.arange(len(queries)).split(block):
        mean, total, most = 0.0, 0.0, torch.full((len(rows), 1), -torch.inf)
        for over in torch.arange(int(rows[-1]) + 1).split(block):  # what comes later is not read
            scores = queries[rows] @ keys[over].T * scaling
            scores = scores if bias is None else scores + bias[rows][:, over]
            scores = scores.masked_fill(over > rows[:, None], -torch.inf)
            larger = torch.maximum(most, scores.amax(1, keepdim=True))
            size, shrink = (scores - larger).exp(), (most - larger).exp()  # to the largest score so far
            mean, total = mean * shrink + size @ values[over], total * shrink + size.sum(1, keepdim=True)
            most = larger
        found.append(mean / total)
    return torch.cat(found)


def kv_head(head: int, heads: int, kv_heads: int) -> int:
    """The KV head that a query head reads: neighbours share one (Ainslie et al. 2023, section 2.2)."""
    return head // (heads // kv_heads)


def group_weights(queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """What tokens get from the query heads of one KV head: the mean of the heads' weights, `[tokens]`.

    queries `[group, head_dim]`, keys `[tokens, head_dim]`.
    """
    return sum(weights(query, keys, scaling) for query in queries) / len(queries)


def received(queries: Tensor, keys: Tensor, scaling: float, first: int = 0, window=None) -> Tensor:
    """What every token of a prompt got from its queries at positions `first` and later, summed, `[tokens]`.

    queries `[group, tokens, head_dim]`, keys `[tokens, head_dim]`.
    """
    total = torch.zeros(len(keys), dtype=keys.dtype)
    for at in range(max(0, first), len(keys)):
        over = seen(at, window)
        total[over] += group_weights(queries[:, at], keys[over], scaling)
    return total
