"""Chapter 1: recompute."""

import torch

from .exercise import Choice, Exercise

# 1. The line that chooses the next token.


def _greedy(logits):
    return logits[:, -1].argmax(-1)


def _logit_cases():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=generator),) for shape in ((1, 6, 11), (3, 4, 7), (2, 1, 5))]


greedy = Exercise(
    "greedy",
    _greedy,
    _logit_cases,
    {
        "you read the first position; the next token is predicted at the last": lambda x: x[:, 0].argmax(-1),
        "that is one token for every position; only the last predicts a new one": lambda x: x.argmax(-1),
        "that is the value of the largest logit; the token is its index": lambda x: x[:, -1].amax(-1),
        "you looked for the maximum along the batch; the vocabulary is the last dimension": lambda x: x[
            :, -1
        ].argmax(0),
    },
    "one token for each row, from the logits of the last position",
)


# 2. The published decode formula, repaired.


def _decode_flops(b, held, h, l, V):
    return l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V


def _flop_cases():
    return [(1, 17, 32, 2, 96), (3, 100, 64, 4, 211), (2, 1, 16, 1, 50)]


decode_flops = Exercise(
    "decode_flops",
    _decode_flops,
    _flop_cases,
    {
        "the attention term has lost its factor h: each of the held keys has h numbers": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V
        ),
        "the logits term has a factor h too many: [b, 1, h] x [h, V] costs 2bhV": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V * h
        ),
        "both are still wrong: the attention term lacks a factor h and the logits term has one too many": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V * h
        ),
        "you counted the logits once for each layer; they are computed once, after the last": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h + 2 * b * h * V)
        ),
        "that is the cost of feeding all tokens again; a decode step feeds one": (
            lambda b, held, h, l, V: l * (24 * b * held * h**2 + 4 * b * held**2 * h) + 2 * b * held * h * V
        ),
    },
    "this is what the counter counts",
)

# 3. Design: what to do about the growth.

growth = Choice(
    "growth",
    "c",
    {
        "a": "a faster machine divides every step by the same factor; the number of tokens fed still grows "
        "with the square of the length",
        "b": "a window bounds the work, but what lies before the window is lost; the result is another one",
        "c": "keys and values of earlier tokens never change, so computing them once is enough; "
        "chapter 2 keeps them",
        "d": "earlier logits are not used again: keeping them saves nothing in the next step",
    },
)
