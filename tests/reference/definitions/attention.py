"""Attention by its definition (Vaswani et al. 2017, section 3.2.1): of one query, and of a whole prompt."""

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
