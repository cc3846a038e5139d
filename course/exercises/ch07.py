# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 7: InfiniGen."""

import math

import torch

from course.teaching.check.answer import plain
from course.teaching.check.exercise import Choice, Exercise

# 1. What a layer will fetch: columns, a partial score, the alpha rule.


def _chosen(
    size=lambda queries, keys: queries.abs().sum(1) + keys.abs().sum(1),
    take=lambda size, count: size.topk(count).indices,
    kept=lambda part, d: round(part * d),
    width=lambda d, columns: d,
    read=lambda x: x,
    top=lambda scores: scores.amax(-1, keepdim=True),
    near=lambda scores, top, alpha: scores > top - alpha,
    count=lambda counts: math.ceil(counts.mean().item()),
    capped=min,
    best=lambda scores, count: scores.topk(count).indices,
    asks=lambda guess, queries: guess,
):
    """InfiniGen's choice with one part exchanged."""

    def choose(queries, keys, guess, part, alpha, cap):
        tokens, d = keys.shape[1:]
        columns = take(size(queries, keys), kept(part, d)).expand(len(keys), -1)
        q = asks(guess, queries).gather(-1, columns)  # [heads, c]
        k = keys.gather(-1, columns[:, None].expand(-1, tokens, -1))  # [heads, tokens, c]
        scores = read((k @ q[..., None])[..., 0] / width(d, columns) ** 0.5)  # [heads, tokens]
        counts = near(scores, top(scores), alpha).sum(-1).float()  # [heads]
        return best(scores, max(1, min(capped(cap, count(counts)), tokens)))

    return choose


_choose = _chosen()


def _row_by_row(one, other):
    """The same members in every row, in any order."""
    one, other = plain(one), plain(other)
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
        return False
    return torch.equal(one.double().sort(-1).values, other.double().sort(-1).values)


def _guesses():
    draw = torch.Generator().manual_seed(17)

    def made(heads, tokens, d, part, alpha, cap, spread=1.6):
        loud = torch.rand(2, heads, 1, d, generator=draw) * 2  # columns differ in size, and from head to head
        queries, keys = torch.randn(2, heads, tokens, d, generator=draw) * loud * spread
        guess = torch.randn(heads, d, generator=draw) * loud[0, :, 0] * spread
        guess[0] *= 1.8  # one head has larger scores than the others
        return queries, keys, guess, part, alpha, cap

    return [
        made(1, 30, 8, 1.0, 1.0, 1),
        made(1, 40, 12, 0.4, 2.0, 40),
        made(3, 50, 16, 0.4, 2.5, 50),
        made(4, 60, 12, 0.3, 2.0, 60),
        made(5, 60, 16, 0.3, 4.0, 6),
        made(7, 45, 10, 0.45, 1.5, 45),
    ]


choose = Exercise(
    "choose",
    _choose,
    _guesses,
    {
        "all columns are used: the other ones are on the host with the tokens": _chosen(
            kept=lambda part, d: d
        ),
        "the first columns are used; each head takes those that are largest over the prompt": _chosen(
            take=lambda size, count: torch.arange(count).expand(len(size), -1)
        ),
        "the columns of head 0 are used for all heads: each chooses its own": _chosen(
            take=lambda size, count: size[:1].topk(count).indices
        ),
        "the heads choose their columns together; each chooses its own": _chosen(
            take=lambda size, count: size.sum(0, keepdim=True).topk(count).indices
        ),
        "the number of columns is rounded up; `part` of d is rounded, as round() does it": _chosen(
            kept=lambda part, d: math.ceil(part * d)
        ),
        "the number of columns is cut off; `part` of d is rounded, as round() does it": _chosen(
            kept=lambda part, d: int(part * d)
        ),
        "the smallest columns are kept: those that may be left out": _chosen(
            take=lambda size, count: size.topk(count, largest=False).indices
        ),
        "only the queries choose the columns; the keys' magnitudes are added to theirs": _chosen(
            size=lambda queries, keys: queries.abs().sum(1)
        ),
        "only the keys choose the columns; the queries' magnitudes are added to theirs": _chosen(
            size=lambda queries, keys: keys.abs().sum(1)
        ),
        "the columns are summed with their signs: positive and negative values cancel": _chosen(
            size=lambda queries, keys: queries.sum(1) + keys.sum(1)
        ),
        "a large product of query and key is looked for; the rule adds the two magnitudes": _chosen(
            size=lambda queries, keys: queries.abs().sum(1) * keys.abs().sum(1)
        ),
        "the newest query of the prompt asks; the guess is what the next layer will ask": _chosen(
            asks=lambda guess, queries: queries[:, -1]
        ),
        "divide by the root of d, the whole head dimension: the partial score stands for the whole one": _chosen(
            width=lambda d, columns: columns.shape[-1]
        ),
        "the scores are not divided by the root of d, and alpha is a distance of scores": _chosen(
            width=lambda d, columns: 1
        ),
        "the scores are divided by d; divide by its root": _chosen(width=lambda d, columns: d**2),
        "one maximum for all heads: heads with small scores would fetch nothing; each has its own": _chosen(
            top=lambda scores: scores.max()
        ),
        "the distance is taken from the mean score; it is from the largest": _chosen(
            top=lambda scores: scores.mean(-1, keepdim=True)
        ),
        "alpha is a distance from the largest score, no threshold of its own": _chosen(
            near=lambda scores, top, alpha: scores > alpha
        ),
        "you counted the tokens that are far below the best: those stay on the host": _chosen(
            near=lambda scores, top, alpha: scores <= top - alpha
        ),
        "you rounded the mean down: a part of a token more is a token more": _chosen(
            count=lambda counts: math.floor(counts.mean().item())
        ),
        "one more than the mean, cut off: a mean that is whole gets a token too many; round it up": _chosen(
            count=lambda counts: int(counts.mean().item()) + 1
        ),
        "the largest count of any head is taken; the rule takes the mean over the heads": _chosen(
            count=lambda counts: int(counts.max().item())
        ),
        "the smallest count of any head is taken; the rule takes the mean over the heads": _chosen(
            count=lambda counts: int(counts.min().item())
        ),
        "the counts of the heads are added up; the rule takes their mean": _chosen(
            count=lambda counts: int(counts.sum().item())
        ),
        "the cap is missing: no step may fetch more than cap tokens": _chosen(
            capped=lambda cap, count: count
        ),
        "cap tokens are always fetched: count first, it is only the largest number allowed": _chosen(
            capped=lambda cap, count: cap
        ),
        "the tokens with the lowest scores are fetched": _chosen(
            best=lambda scores, count: scores.topk(count, largest=False).indices
        ),
        "large magnitudes are fetched; a score far below zero is a token that nobody looks at": _chosen(
            best=lambda scores, count: scores.abs().topk(count).indices
        ),
        "those are the scores; asked for are the tokens": _chosen(
            best=lambda scores, count: scores.topk(count).values
        ),
        "head 0 chooses for all; each head fetches its own tokens": _chosen(
            best=lambda scores, count: scores[:1].topk(count).indices.expand(len(scores), -1)
        ),
        "tokens are counted from 0": _chosen(best=lambda scores, count: scores.topk(count).indices + 1),
        "the newest tokens are fetched; asked for are those with the largest scores": _chosen(
            best=lambda scores, count: torch.arange(scores.shape[1] - count, scores.shape[1]).expand(
                len(scores), -1
            )
        ),
    },
    "a few columns choose, alpha says how many, and each head fetches its own",
    alike=_row_by_row,
    holds="indices",
    grows=(
        "one head, all columns, one token",
        "some columns, and alpha",
        "three heads, each with columns of its own",
        "a mean that must be rounded up",
        "a cap",
        "seven heads, a narrow alpha",
    ),
    signs={
        "a step fetches more than `cap` tokens": lambda r, q, k, g, part, alpha, cap: r.shape[-1] > cap,
        "every head fetches the same number of tokens: [heads, n]": lambda r, q, *case: r.dim() != 2,
        "you fetch more tokens than the rule says": lambda r, *case: r.shape[-1] > _choose(*case).shape[-1],
        "you fetch fewer tokens than the rule says": lambda r, *case: r.shape[-1] < _choose(*case).shape[-1],
    },
)

# 2. The planted bug: whose norm, whose weights, whose input.


def _norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * gain


def _rehearse(layer, inputs, gains, weights):
    return weights[layer] @ _norm(inputs[layer - 1], gains[layer])


def norm(x, gain):
    return _norm(x, gain)


def _as_found(layer, inputs, gains, weights):
    return weights[layer - 1] @ norm(inputs[layer - 1], gains[layer - 1])


def _blocks():
    generator = torch.Generator().manual_seed(8)
    make = lambda *shape: torch.randn(shape, generator=generator)
    return [(layer, make(4, 6), make(4, 6), make(4, 6, 6)) for layer in (1, 2, 3)]


rehearse = Exercise(
    "rehearse",
    _rehearse,
    _blocks,
    {
        "that is the query of the layer before: W_q must be the one of the layer whose tokens you fetch": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i - 1], g[i - 1])
        ),
        "W_q belongs to the layer before: use the one of the layer whose tokens you fetch": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i - 1], g[i])
        ),
        "the norm belongs to the layer before (as in the official code): use the layer's own": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 1], g[i - 1])
        ),
        "this input is not known yet when the fetch must begin: use the input of the block before": (
            lambda i, x, g, w: w[i] @ _norm(x[i], g[i])
        ),
        "the norm is missing: the layer multiplies W_q with the normed input": (
            lambda i, x, g, w: w[i] @ x[i - 1]
        ),
        "only the gain is there: the norm first divides by the root of the mean square": (
            lambda i, x, g, w: w[i] @ (x[i - 1] * g[i])
        ),
        "the norm is missing, and W_q belongs to the layer before": lambda i, x, g, w: w[i - 1] @ x[i - 1],
        "the layer's own input is not known yet, and it is not normed": lambda i, x, g, w: w[i] @ x[i],
        "that is two layers early: use the input of the block before": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 2], g[i])
        ),
        "that is layer + 1: fetch for `layer`, from the input of layer - 1": (
            lambda i, x, g, w: w[min(i + 1, len(w) - 1)] @ _norm(x[i], g[min(i + 1, len(g) - 1)])
        ),
        "W_q is transposed: the query is W_q times the input": (
            lambda i, x, g, w: _norm(x[i - 1], g[i]) @ w[i]
        ),
        "W_q is transposed, and of the layer before": lambda i, x, g, w: _norm(x[i - 1], g[i - 1]) @ w[i - 1],
        "the norm comes after W_q; it comes before": lambda i, x, g, w: _norm(w[i] @ x[i - 1], g[i]),
        "normed twice: by the layer before and by the layer itself": (
            lambda i, x, g, w: w[i] @ _norm(_norm(x[i - 1], g[i - 1]), g[i])
        ),
        "you multiplied element by element; W_q @ x is a product with a matrix": (
            lambda i, x, g, w: w[i] * _norm(x[i - 1], g[i])
        ),
        "that is the normed input; the query is W_q times it": lambda i, x, g, w: _norm(x[i - 1], g[i]),
        "the gain is missing: the norm multiplies with the layer's own weights": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 1], torch.ones_like(g[i]))
        ),
        "the wrong way round: input of the layer itself, norm of the one before": (
            lambda i, x, g, w: w[i] @ _norm(x[i], g[i - 1])
        ),
        "this input is not known yet, and norm and weights are of the layer before": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i], g[i - 1])
        ),
    },
    "the layer's own norm and weights, on the input of the block before",
    given=_as_found,
)

# 3. Decide: which of the dials to turn.

dial = Choice(
    "dial",
    "a",
    {
        "a": "the link is idle for 30 milliseconds of 90, so half as many tokens again cross without a wait, and the device "
        "holds nothing more: if the answers stay worse, the guess is at fault and not the number",
        "b": "0.4 in place of 0.3 takes 0.7 GB more on the device, and 0.2 are free",
        "c": "what leaves the pool is gone for good; accuracy can only fall, and no time is short",
        "d": "the input of the block two before is less like the layer's own: the guess gets worse, and "
        "there is no stall that an earlier start would remove",
    },
)
