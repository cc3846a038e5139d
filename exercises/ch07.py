"""Chapter 7: InfiniGen."""

import math

import torch

from course.teaching.check.exercise import Choice, Exercise

# 1. The alpha rule.


def _near(scores, alpha):
    return (scores > scores.amax(-1, keepdim=True) - alpha).sum(-1).float()  # [heads]


def _how_many(scores, alpha, cap):
    return min(cap, math.ceil(_near(scores, alpha).mean().item()))


def _guessed_scores():
    generator = torch.Generator().manual_seed(7)
    cases = []
    for heads, tokens, alpha, cap, spread in (
        (3, 40, 2.0, 30, 2.0),
        (4, 25, 4.0, 25, 3.0),
        (2, 60, 4.0, 9, 1),
        (5, 30, 3.0, 30, 2.0),
        (7, 50, 2.0, 50, 1.5),
        (6, 35, 3.0, 35, 1.5),
    ):
        scores = torch.randn(heads, tokens, generator=generator) * spread
        scores[0] += 8.0  # one head's scores are larger than the others'
        cases.append((scores, alpha, cap))
    return cases


how_many = Exercise(
    "how_many",
    _how_many,
    _guessed_scores,
    {
        "you took one maximum for all heads; each head has its own (a fault of the official code, too)": (
            lambda s, a, cap: min(cap, math.ceil((s > s.max() - a).sum(-1).float().mean().item()))
        ),
        "you added the heads up; the count is their mean": (
            lambda s, a, cap: min(cap, math.ceil(_near(s, a).sum().item()))
        ),
        "that is the largest count of any head; the rule takes the mean over the heads": (
            lambda s, a, cap: min(cap, math.ceil(_near(s, a).max().item()))
        ),
        "the cap is missing: no step may fetch more than cap tokens": (
            lambda s, a, cap: math.ceil(_near(s, a).mean().item())
        ),
        "alpha is a distance from the largest score, not a threshold of its own": (
            lambda s, a, cap: min(cap, math.ceil((s > a).sum(-1).float().mean().item()))
        ),
        "you counted the tokens that are far below the largest score: those are the ones to leave": (
            lambda s, a, cap: min(
                cap, math.ceil((s <= s.amax(-1, keepdim=True) - a).sum(-1).float().mean().item())
            )
        ),
        "you rounded down: a part of a token more is a token more": (
            lambda s, a, cap: min(cap, math.floor(_near(s, a).mean().item()))
        ),
        "you rounded to the nearest; a part of a token more is a token more": (
            lambda s, a, cap: min(cap, round(_near(s, a).mean().item()))
        ),
        "not rounded yet: a number of tokens is whole, and rounded up": (
            lambda s, a, cap: min(cap, _near(s, a).mean().item())
        ),
        "that is the smallest count of any head; the rule takes the mean over the heads": (
            lambda s, a, cap: min(cap, math.ceil(_near(s, a).min().item()))
        ),
        "one count for each head; the heads share one number, their mean": (
            lambda s, a, cap: _near(s, a).clamp(max=cap)
        ),
        "the maximum is taken over the heads (dimension 0); each head looks over its tokens": (
            lambda s, a, cap: min(
                cap, math.ceil((s > s.amax(0, keepdim=True) - a).sum(-1).float().mean().item())
            )
        ),
        "max and min are exchanged: cap is the largest number allowed, not the smallest": (
            lambda s, a, cap: max(cap, math.ceil(_near(s, a).mean().item()))
        ),
        "that is a fraction of the tokens (a mean over both dimensions); sum over the tokens first": (
            lambda s, a, cap: min(cap, math.ceil((s > s.amax(-1, keepdim=True) - a).float().mean().item()))
        ),
        "you took the distance from the mean score; it is from the largest": (
            lambda s, a, cap: min(
                cap, math.ceil((s > s.mean(-1, keepdim=True) - a).sum(-1).float().mean().item())
            )
        ),
        "no score lies above this threshold, so you count none: it is the head's maximum minus alpha": (
            lambda s, a, cap: min(
                cap, math.ceil((s > s.amax(-1, keepdim=True) + a).sum(-1).float().mean().item())
            )
        ),
        "that is always cap: count first": lambda s, a, cap: cap,
        "you counted the tokens that any head wants; the rule takes the mean of the heads' counts": (
            lambda s, a, cap: min(cap, int((s > s.amax(-1, keepdim=True) - a).any(0).sum()))
        ),
        "one more than the rule says: ceil rounds up already": (
            lambda s, a, cap: min(cap, math.ceil(_near(s, a).mean().item()) + 1)
        ),
    },
    "as many as lie within alpha of the best, on average over the heads, and at most cap",
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

# 3. Design: which of the dials to turn.

dial = Choice(
    "dial",
    "a",
    {
        "a": "a larger alpha fetches more tokens, and the link has time to carry them; nothing else grows",
        "b": "more columns make the partial key cache larger, and it lives where there is no room left",
        "c": "what leaves the pool is gone for good; accuracy can only fall",
        "d": "the input of the block two before is less like the layer's own: the guess gets worse, and "
        "there is no stall that an earlier start would remove",
    },
)
