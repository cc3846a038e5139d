"""Chapter 7: InfiniGen."""

import math

import torch

from .exercise import Choice, Exercise

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
    },
    "as many as lie within alpha of the best, on average over the heads, and at most cap",
)

# 2. The planted bug: whose norm, whose weights, whose input.


def _norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * gain


def _rehearse(layer, inputs, gains, weights):
    return weights[layer] @ _norm(inputs[layer - 1], gains[layer])


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
    },
    "the layer's own norm and weights, on the input of the block before",
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
