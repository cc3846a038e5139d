# ruff: noqa: E501 (a sentence is one line)
"""Chapter 7: InfiniGen."""

import torch

from course.teaching.check.answer import same, same_rows
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. What a layer will fetch: columns, a partial score, the alpha rule.


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
        made(7, 45, 10, 0.45, 1.5, 9),
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
    RIGHT["choose"],
    _guesses,
    MISTAKES["choose"],
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


def norm(x, gain):
    return _norm(x, gain)


def _as_found(layer, inputs, gains, weights):
    return weights[layer - 1] @ norm(inputs[layer - 1], gains[layer - 1])


def _blocks(draw):
    make = lambda *shape: torch.randn(shape, generator=draw)
    return [(layer, make(4, 6), make(4, 6), make(4, 6, 6)) for layer in (1, 2, 3)]


rehearse = Exercise(
    "rehearse",
    RIGHT["rehearse"],
    _blocks,
    MISTAKES["rehearse"],
    "the layer's own norm and weights, on the input of the layer before",
    given=_as_found,
    signs={
        "the direction is right; the length is not: all numbers have the same wrong factor": (
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
