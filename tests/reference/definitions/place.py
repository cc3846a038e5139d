"""Place: which tokens held on the host a step fetches, and what that moves."""

import math

import torch
from torch import Tensor

from .attention import group_weights
from .keep import rotation


def best(importance: Tensor, count: int) -> list[int]:
    """Where the `count` largest numbers of `[tokens]` are; of equal ones, any."""
    order = sorted(range(len(importance)), key=lambda token: -float(importance[token]))
    return sorted(order[:count])


def topk(queries: Tensor, keys: Tensor, scaling: float, count: int) -> list[int]:
    """Top-k attention (Gupta et al. 2021, section 2): the past tokens that this step's queries weigh most.

    queries `[group, head_dim]`, the query heads of one KV head; keys `[past tokens, head_dim]`.
    """
    return best(group_weights(queries, keys, scaling), count)


def page_bound(query: Tensor, keys: Tensor) -> float:
    """Quest (Tang et al. 2024, section 3.3): what a query `[head_dim]` can score at most in a page whose keys
    are `[tokens, head_dim]`, from the smallest and the largest value of every channel."""
    channels = zip(query.tolist(), keys.T.tolist(), strict=True)
    return sum(max(q * min(channel), q * max(channel)) for q, channel in channels)


def page_estimate(query: Tensor, keys: Tensor) -> float:
    """ArkVale (Chen et al. 2024): what a query `[head_dim]` is guessed to score at most in a page whose keys
    are `[tokens, head_dim]`: its bound, if every channel went from the middle of its smallest and its largest
    value as far as the keys are away from it in the mean."""
    middle = (keys.min(0).values + keys.max(0).values) / 2
    spread = sum((key - middle).abs() for key in keys) / len(keys)
    return page_bound(query, torch.stack([middle - spread, middle + spread]))


def pages(queries: Tensor, keys: list[Tensor], scaling: float, count: int, bound=page_bound) -> list[int]:
    """Quest: the pages that one KV head fetches: the weight of a page in a query head is the softmax over
    pages of their scaled bounds, and the pages with the largest mean over the group's heads are fetched.

    queries `[group, head_dim]`; keys: of every page, `[tokens, head_dim]`; bound: `page_bound` or
    `page_estimate`.
    """
    bounds = torch.tensor([[bound(query, page) * scaling for page in keys] for query in queries])
    return best(bounds.softmax(-1).mean(0), count)


def page_count(budget: int, page: int) -> int:
    """Quest's official code: whole pages within the budget, three at least."""
    return max(3, budget // page)


def low_rank(keys: Tensor, frequencies: list[float], rank: int) -> Tensor:
    """ShadowKV (Sun et al. 2024, section 4.1): a prompt's keys as `rank` numbers of each token tell them.

    keys `[kv_heads, tokens, head_dim]` after RoPE with these frequencies -> same. The rotation is undone, the
    heads' keys side by side are cut to the `rank` largest components of their SVD, and rotated again.
    """
    heads, tokens, width = keys.shape
    turns = [rotation(position, frequencies, width) for position in range(tokens)]
    plain = torch.stack(
        [torch.stack([turns[t].T @ mine[t] for t in range(tokens)]) for mine in keys.double()]
    )
    u, s, vh = torch.linalg.svd(plain.transpose(0, 1).reshape(tokens, -1), full_matrices=False)
    cut = (u[:, :rank] * s[:rank] @ vh[:rank]).reshape(tokens, heads, width).transpose(0, 1)
    return torch.stack([torch.stack([turns[t] @ mine[t] for t in range(tokens)]) for mine in cut])


def shadow_parts(keys: Tensor, chunk: int, outliers: int, recent: int) -> tuple[list[list[int]], list[int]]:
    """ShadowKV, algorithm 1: (tokens of every chunk that may be chosen, tokens that stay exact), of one KV
    head's prompt. keys `[tokens, head_dim]` after RoPE.

    Exact are the `outliers` chunks in which some key makes the smallest cosine with their mean, the last
    `recent` whole chunks, and what is left over.
    """
    first = max(0, len(keys) // chunk - recent)
    chunks = [list(range(i * chunk, (i + 1) * chunk)) for i in range(first)]

    def worst(tokens: list[int]) -> float:
        mean = keys[tokens].double().mean(0)
        return min(float(key @ mean / key.norm() / mean.norm()) for key in keys[tokens].double())

    order = sorted(range(first), key=lambda i: worst(chunks[i]))
    exact = [token for i in order[:outliers] for token in chunks[i]]
    return [chunks[i] for i in sorted(order[outliers:])], sorted([*exact, *range(first * chunk, len(keys))])


def shadow_chunks(queries: Tensor, landmarks: list[Tensor], scaling: float, count: int) -> list[int]:
    """ShadowKV, algorithm 2: the chunks that one KV head makes anew: those with the largest weight of any
    query head of the group, by the softmax over the landmarks (`[head_dim]`, the chunk's mean key).

    queries `[group, head_dim]`.
    """
    scores = torch.stack(landmarks) @ queries.T * scaling
    return best(scores.softmax(0).amax(1), count)


def skew(queries: Tensor) -> Tensor:
    """InfiniGen (Lee et al. 2024, section 4.2): A = V of Q = U S V^T, so that (Q A)(K A)^T = Q K^T.

    queries `[tokens, head_dim]` of one KV head on a calibration text (its query heads one after the other)
    -> `[head_dim, head_dim]`, orthogonal; the first columns of Q A are the largest.
    """
    return torch.linalg.svd(queries).Vh.T


def column_count(ratio: float, head_dim: int, variant: str = "paper") -> int:
    """InfiniGen: columns that the guess is made of. The official code rounds down; at least one here."""
    return max(1, round(ratio * head_dim) if variant == "paper" else int(ratio * head_dim))


def columns(queries: Tensor, keys: Tensor, count: int, variant: str = "paper") -> list[int]:
    """InfiniGen, section 4.3: the columns of skewed Q and K that the guess is made of, after the prompt.

    queries `[group, tokens, head_dim]`, keys `[tokens, head_dim]`, skewed. "paper": the largest sums over the
    prompt of |Q| (mean over the group) + |K|. The official code: "official-speed": of |Q| alone, the queries
    being those of the batch's first row; "official-accuracy" and "official-accuracy-llama": the `count` best
    of |Q| and those of |K| together.
    """
    asked, held = queries.abs().mean(0).sum(0), keys.abs().sum(0)
    if variant == "official-speed":
        return best(asked, count)
    if variant.startswith("official-accuracy"):
        return sorted({*best(asked, count), *best(held, count)})
    return best(asked + held, count)


def how_many(scores: list[Tensor], alpha: float, cap: int, variant: str = "paper") -> int:
    """InfiniGen, section 4.3: tokens to fetch, one number for all heads: the mean over the heads, rounded up,
    of how many guessed scores come within `alpha` of the head's best; at most `cap`, at least 1.

    scores: `[past tokens]` of every query head, in the official code those of all rows, one row after the
    other. There the mean is rounded down; for accuracy a score that is exactly `alpha` away counts too, and
    for Llama what is best in the first of all heads is the best of every head.
    """
    near = []
    for head in scores:
        top = float((scores[0] if variant == "official-accuracy-llama" else head).max())
        inside = [float(s) >= top - alpha if "accuracy" in variant else float(s) > top - alpha for s in head]
        near.append(sum(inside))
    mean = sum(near) / len(near)
    return max(1, min(cap, math.ceil(mean) if variant == "paper" else math.floor(mean)))


def guess(query: Tensor, keys: Tensor, skewing: Tensor, chosen: list[int], scaling: float) -> Tensor:
    """InfiniGen: the scores that one query head is guessed to give, `[past tokens]`, by the chosen columns.

    query `[head_dim]`: what the layer would ask if its input were that of the block before it; keys
    `[past tokens, head_dim]`; skewing: A `[head_dim, head_dim]` of the KV head.
    """
    return (keys @ skewing)[:, chosen] @ (query @ skewing)[chosen] * scaling


def fetched(scores: Tensor, count: int) -> list[int]:
    """InfiniGen: what one KV head fetches, by the guessed scores `[group, past tokens]` of its query heads:
    the tokens with the largest weights, mean over the group."""
    return best(scores.softmax(-1).mean(0), count)


def token_bytes(head_dim: int, bits: float, scales: int = 0) -> int:
    """Bytes of one token's K and V in one KV head, with so many fp16 scales for each of the two."""
    return int(2 * (head_dim * bits / 8 + 2 * scales))


def moved(slots: int, new: int, kv_heads: int, size: int) -> int:
    """Bytes that a step moves in one layer and row: `slots` fetched in all KV heads together, and the new
    tokens written back. size: of one token in one head."""
    return (slots + new * kv_heads) * size


def on_device(held: int, memory: int, touched: bool) -> bool:
    """Unified memory: nothing moves while all that is held fits, once a step has touched it."""
    return touched and held <= memory
