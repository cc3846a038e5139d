# ruff: noqa: E501 (a sentence is one line)
"""Chapter 7: InfiniGen."""

import math

import torch

from course.teaching.check.answer import same, same_rows
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


def _choose_as_found(queries, keys, guess, part, alpha, cap):
    tokens, d = keys.shape[1:]
    size = queries.abs().sum(1) + keys.abs().sum(1)
    columns = size.topk(round(part * d)).indices
    q, k = guess.gather(-1, columns), keys.gather(-1, columns[:, None].expand(-1, tokens, -1))
    scores = (k @ q[..., None]).squeeze(-1) / d**0.5  # noqa: F841 (a learner goes on from here)


def _guesses(draw):
    def made(heads, tokens, d, part, alpha, cap, spread=1.6):
        loud = torch.rand(2, heads, 1, d, generator=draw) * 0.6 + 0.7  # columns differ, and from head to head
        queries, keys = torch.randn(2, heads, tokens, d, generator=draw) * loud * spread
        guess = torch.randn(heads, d, generator=draw) * loud[0, :, 0] * spread
        guess[0] *= 1.8  # one head has larger scores than the others
        return queries, keys, guess, part, alpha, cap

    return [
        made(1, 40, 8, 1.0, 4.0, 40),
        made(1, 40, 24, 0.4, 2.0, 40),
        made(3, 50, 16, 0.4, 2.5, 50),
        made(4, 60, 12, 0.3, 2.0, 60),
        made(5, 60, 16, 0.3, 4.0, 6),
        made(7, 45, 10, 0.45, 1.5, 45),
    ]


_TESTS = {  # of an answer that passes the tests before this one
    "with all columns your choice is right, with some of them it is not: how does a head choose its columns?": (
        lambda r, right, q, k, g, part, *case: part < 1 and len(q) == 1
    ),
    "one head chooses right, several do not: each has its own columns and maximum, and all share the mean count": (
        lambda r, right, q, *case: len(q) == 3
    ),
}


choose = Exercise(
    "choose",
    _choose,
    _guesses,
    {
        "all columns are used: take `part` of them": _chosen(kept=lambda part, d: d),
        "the first columns are used: each head takes those that are largest over the prompt": _chosen(
            take=lambda size, count: torch.arange(count).expand(len(size), -1)
        ),
        "the columns of head 0 are used for all heads: each chooses its own": _chosen(
            take=lambda size, count: size[:1].topk(count).indices
        ),
        "the heads choose their columns together; each chooses its own": _chosen(
            take=lambda size, count: size.sum(0, keepdim=True).topk(count).indices
        ),
        "the number of columns is rounded up: use round(part * d)": _chosen(
            kept=lambda part, d: math.ceil(part * d)
        ),
        "the number of columns is rounded down: use round(part * d)": _chosen(
            kept=lambda part, d: int(part * d)
        ),
        "the smallest columns are used: take the largest": _chosen(
            take=lambda size, count: size.topk(count, largest=False).indices
        ),
        "the queries alone choose the columns: add the magnitudes of the keys": _chosen(
            size=lambda queries, keys: queries.abs().sum(1)
        ),
        "the keys alone choose the columns: add the magnitudes of the queries": _chosen(
            size=lambda queries, keys: keys.abs().sum(1)
        ),
        "the columns are summed with their signs, so that positive and negative values cancel: take abs()": _chosen(
            size=lambda queries, keys: queries.sum(1) + keys.sum(1)
        ),
        "you add queries and keys before you take magnitudes: add the magnitudes of both": _chosen(
            size=lambda queries, keys: (queries + keys).abs().sum(1)
        ),
        "the largest magnitude of each column chooses: add up the magnitudes of all tokens": _chosen(
            size=lambda queries, keys: queries.abs().amax(1) + keys.abs().amax(1)
        ),
        "you multiply the magnitudes of queries and keys: the rule adds them": _chosen(
            size=lambda queries, keys: queries.abs().sum(1) * keys.abs().sum(1)
        ),
        "the newest query of the prompt asks: the guess must ask": _chosen(
            asks=lambda guess, queries: queries[:, -1]
        ),
        "you divide by the root of the number of columns: divide by the root of d": _chosen(
            width=lambda d, columns: columns.shape[-1]
        ),
        "the scores are not divided by the root of d": _chosen(width=lambda d, columns: 1),
        "the scores are divided by d: divide by its root": _chosen(width=lambda d, columns: d**2),
        "all heads share one maximum: each has its own": _chosen(top=lambda scores: scores.max()),
        "alpha is taken from the mean score: take it from the largest": _chosen(
            top=lambda scores: scores.mean(-1, keepdim=True)
        ),
        "you compare the scores with alpha: compare them with the largest score minus alpha": _chosen(
            near=lambda scores, top, alpha: scores > alpha
        ),
        "you count the scores below the maximum minus alpha: count those above it": _chosen(
            near=lambda scores, top, alpha: scores <= top - alpha
        ),
        "the mean count is rounded down: round it up": _chosen(
            count=lambda counts: math.floor(counts.mean().item())
        ),
        "you cut off the mean and add 1, which is too many when it is whole: round it up": _chosen(
            count=lambda counts: int(counts.mean().item()) + 1
        ),
        "you take the largest count of any head: take the mean over the heads": _chosen(
            count=lambda counts: int(counts.max().item())
        ),
        "you take the smallest count of any head: take the mean over the heads": _chosen(
            count=lambda counts: int(counts.min().item())
        ),
        "the counts of the heads are added up: take their mean": _chosen(
            count=lambda counts: int(counts.sum().item())
        ),
        "the cap is missing: fetch at most cap tokens": _chosen(capped=lambda cap, count: count),
        "you always fetch cap tokens: cap is only the most that is allowed": _chosen(
            capped=lambda cap, count: cap
        ),
        "the tokens with the lowest scores are fetched: take the highest": _chosen(
            best=lambda scores, count: scores.topk(count, largest=False).indices
        ),
        "the tokens with the largest magnitudes are fetched: a score far below zero is a low one": _chosen(
            best=lambda scores, count: scores.abs().topk(count).indices
        ),
        "those are the scores: return the tokens that have them (.indices)": _chosen(
            best=lambda scores, count: scores.topk(count).values
        ),
        "head 0 chooses the tokens for all heads: each fetches its own": _chosen(
            best=lambda scores, count: scores[:1].topk(count).indices.expand(len(scores), -1)
        ),
        "every number is too large by 1: tokens are counted from 0": _chosen(
            best=lambda scores, count: scores.topk(count).indices + 1
        ),
        "the newest tokens are fetched: take those with the largest scores": _chosen(
            best=lambda scores, count: torch.arange(scores.shape[1] - count, scores.shape[1]).expand(
                len(scores), -1
            )
        ),
    },
    "a few columns choose, alpha says how many, and each head fetches its own",
    alike=same_rows,
    holds="indices",
    given=_choose_as_found,
    grows=(
        "one head, all its columns",
        "one head, some columns",
        "three heads, each with columns of its own",
        "a mean that must be rounded up",
        "a cap",
        "seven heads, a narrow alpha",
    ),
    signs={
        "there is no such token: the last one is tokens - 1": lambda r, right, q, k, *case: (
            (r < 0).any() or (r >= k.shape[1]).any()
        ),
        "a head fetches a token twice": lambda r, *case: any(len(row.unique()) < len(row) for row in r),
    }
    | _TESTS
    | {"the number of tokens is right; other tokens have larger scores": lambda *case: True},
    shapes={
        "return one row of tokens for each head, [heads, n]": lambda r, right, q, *case: (
            r.dim() != 2 or len(r) != len(q)
        ),
        "you fetch more than `cap` tokens": lambda r, right, q, k, g, part, alpha, cap: r.shape[-1] > cap,
    }
    | _TESTS
    | {
        "you fetch more tokens than the rule says": lambda r, right, *case: r.shape[-1] > right.shape[-1],
        "you fetch fewer tokens than the rule says": lambda r, right, *case: r.shape[-1] < right.shape[-1],
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


def _blocks(draw):
    make = lambda *shape: torch.randn(shape, generator=draw)
    return [(layer, make(4, 6), make(4, 6), make(4, 6, 6)) for layer in (1, 2, 3)]


rehearse = Exercise(
    "rehearse",
    _rehearse,
    _blocks,
    {
        "that is the query of the layer before: take W_q and the norm of the layer itself": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i - 1], g[i - 1])
        ),
        "W_q belongs to the layer before: take the one of the layer itself": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i - 1], g[i])
        ),
        "the gain belongs to the layer before (as in the official code): take the one of the layer itself": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 1], g[i - 1])
        ),
        "the input is that of the layer itself, which is not known yet: take the one of the layer before": (
            lambda i, x, g, w: w[i] @ _norm(x[i], g[i])
        ),
        "the norm is missing: W_q multiplies the normed input": (lambda i, x, g, w: w[i] @ x[i - 1]),
        "you multiply by the gain and do not divide by the root of the mean square: call norm": (
            lambda i, x, g, w: w[i] @ (x[i - 1] * g[i])
        ),
        "the norm is missing, and W_q belongs to the layer before": lambda i, x, g, w: w[i - 1] @ x[i - 1],
        "the input is that of the layer itself, which is not known yet, and the norm is missing": lambda i, x, g, w: (
            w[i] @ x[i]
        ),
        "the input is that of two layers before: take the one of the layer before": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 2], g[i])
        ),
        "that is the query of layer + 1: compute the one of `layer`, from the input of layer - 1": (
            lambda i, x, g, w: w[min(i + 1, len(w) - 1)] @ _norm(x[i], g[min(i + 1, len(g) - 1)])
        ),
        "W_q is transposed: the query is W_q @ x": (lambda i, x, g, w: _norm(x[i - 1], g[i]) @ w[i]),
        "W_q is transposed, and W_q and gain belong to the layer before": lambda i, x, g, w: (
            _norm(x[i - 1], g[i - 1]) @ w[i - 1]
        ),
        "the norm comes after W_q: it must come before": lambda i, x, g, w: _norm(w[i] @ x[i - 1], g[i]),
        "the input is normed twice: once is enough, with the gain of the layer itself": (
            lambda i, x, g, w: w[i] @ _norm(_norm(x[i - 1], g[i - 1]), g[i])
        ),
        "you multiply element by element: W_q @ x is the product of a matrix and a vector": (
            lambda i, x, g, w: w[i] * _norm(x[i - 1], g[i])
        ),
        "that is the normed input: the query is W_q times it": lambda i, x, g, w: _norm(x[i - 1], g[i]),
        "the gain is missing: norm multiplies by it": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 1], torch.ones_like(g[i]))
        ),
        "input and gain are exchanged: take the input of the layer before, and the gain of the layer itself": (
            lambda i, x, g, w: w[i] @ _norm(x[i], g[i - 1])
        ),
        "input, gain and W_q all belong to the wrong layer: the input must be early, the other two the layer's own": (
            lambda i, x, g, w: w[i - 1] @ _norm(x[i], g[i - 1])
        ),
        "you add the gain: norm multiplies by it": lambda i, x, g, w: w[i] @ (_norm(x[i - 1], 1) + g[i]),
        "you add 1 to the gain, as Gemma does: this model does not": (
            lambda i, x, g, w: w[i] @ _norm(x[i - 1], g[i] + 1)
        ),
        "you add the input to the normed input: W_q multiplies the normed input alone": (
            lambda i, x, g, w: w[i] @ (_norm(x[i - 1], g[i]) + x[i - 1])
        ),
        "norm and product are right, and you add the input: that is done after attention": (
            lambda i, x, g, w: x[i - 1] + w[i] @ _norm(x[i - 1], g[i])
        ),
    },
    "the layer's own norm and weights, on the input of the layer before",
    given=_as_found,
    signs={
        "the direction is right; the length is not: norm divides by the root of the mean square": (
            lambda r, right, *case: same(r / r.norm(), right / right.norm())
        ),
        "you subtract the mean, as a LayerNorm does: this norm does not": lambda r, right, i, x, g, w: any(
            same(r, w[i] @ _norm(one - one.mean(), g[i]), 1e-3) for one in x
        ),
        "W_q of another layer is used: take the one of the layer itself": lambda r, right, i, x, g, w: any(
            same(r, other @ input)
            for j, other in enumerate(w)
            for input in (*x, *(_norm(one, gain) for one in x for gain in g))
            if j != i
        ),
        "W_q is the right one; its input is not": lambda r, right, i, x, g, w: any(
            same(r, w[i] @ input) for input in (*x, *(_norm(one, gain) for one in x for gain in g))
        ),
    },
    shapes={"the query must be one vector, [d]": lambda *case: True},
)

# 3. Decide: which of the dials to turn.

dial = Choice(
    "dial",
    "a",
    {
        "a": "the link is idle for 30 of 90 milliseconds, so half as many tokens again can cross without a wait, and the device holds nothing more. If the answers stay worse, the guess is at fault, and not the number",
        "b": "0.4 instead of 0.3 takes 0.7 GB more on the device, and 0.2 are free",
        "c": "a token that leaves the pool is gone for good. Accuracy can only fall, and you are not short of time",
        "d": "the input of two blocks before is less like the layer's own, so the guess gets worse. There is no stall that an earlier start would remove",
    },
)
