"""Chapter 1: recompute."""

import torch

from course.teaching.check.exercise import Choice, Exercise

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
        "you looked for the maximum along the batch; the vocabulary is the last dimension": (
            lambda x: x[:, -1].argmax(0)
        ),
        "that is the last row of the batch; the last token is in dimension 1": lambda x: x[-1].argmax(-1),
        "those are all logits of the last row; asked for is one token for each row, from [:, -1]": (
            lambda x: x[-1]
        ),
        "you looked for the maximum along the tokens (dimension 1); the vocabulary is the last dimension": (
            lambda x: x.argmax(1)
        ),
        "that is the last entry of the vocabulary at every position; tokens are dimension 1": (
            lambda x: x[:, :, -1].argmax(-1)
        ),
        "that is the least likely token: greedy takes the largest logit": lambda x: x[:, -1].argmin(-1),
        "you read the position before the last: the last one has read the whole text": (
            lambda x: x[:, -2].argmax(-1)
        ),
        "one number for the whole batch: every row has a next token of its own": lambda x: x[:, -1].argmax(),
        "one number for all rows and positions: every row has a next token of its own, at its end": (
            lambda x: x.argmax()
        ),
        "the largest logit of any position: only the last position predicts the next token": (
            lambda x: x.amax(1).argmax(-1)
        ),
        "the mean over all positions is no prediction: take the last position alone": (
            lambda x: x.mean(1).argmax(-1)
        ),
        "the token dimension is still there: the shape is [batch, 1], asked for is [batch]": (
            lambda x: x[:, -1:].argmax(-1)
        ),
        "those are probabilities; the token is the index of the largest": lambda x: x[:, -1].softmax(-1),
        "those are the logits of the last position; the token is the index of the largest": lambda x: x[
            :, -1
        ],
    },
    "one token for each row, from the logits of the last position",
    holds="indices",
)


# 2. The published decode formula, repaired.


def _decode_flops(b, held, h, l, V):
    return l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V


def _published(b, held, h, l, V):
    return l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V * h


def _flop_cases():
    return [(1, 17, 32, 2, 96), (3, 100, 64, 4, 211), (2, 1, 16, 1, 50)]


decode_flops = Exercise(
    "decode_flops",
    _decode_flops,
    _flop_cases,
    {
        "12h² numbers are the weights of a layer, and each is multiplied and added: 24bh², not 12": (
            lambda b, held, h, l, V: l * (12 * b * h**2 + 4 * b * held * h) + 2 * b * h * V
        ),
        "the brackets after l are missing: every layer has both terms, not the first one alone": (
            lambda b, held, h, l, V: l * 24 * b * h**2 + 4 * b * held * h + 2 * b * h * V
        ),
        "the brackets after l end too late or are missing: the logits come once, the rest in every layer": (
            lambda b, held, h, l, V: 24 * b * h**2 + l * 4 * b * held * h + 2 * b * h * V
        ),
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
        "held counts the new token already: do not take it away": (
            lambda b, held, h, l, V: _decode_flops(b, held - 1, h, l, V)
        ),
        "the layers are missing: every layer has its products, the logits come once": (
            lambda b, held, h, l, V: 24 * b * h**2 + 4 * b * held * h + 2 * b * h * V
        ),
        "the batch is missing: every row costs as much again": (
            lambda b, held, h, l, V: _decode_flops(1, held, h, l, V)
        ),
        "the logits are missing: [b, 1, h] x [h, V] costs 2bhV": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h)
        ),
        "you counted queries with keys and forgot weights with values (or the other way): 2bh·held each": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 2 * b * held * h) + 2 * b * h * V
        ),
        "you counted multiply-adds as one operation; the counter counts two": (
            lambda b, held, h, l, V: _decode_flops(b, held, h, l, V) / 2
        ),
        "held counts the new token already: do not add one more (nor the 4bh of the first document)": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held * h) + 2 * b * h * V
        ),
        "h is an axis of 24bh² twice: [b, 1, h] x [h, h] costs 2bh², not 2bh": (
            lambda b, held, h, l, V: l * (24 * b * h + 4 * b * held * h) + 2 * b * h * V
        ),
        "the attention term grows with held, not with its square: one query is fed, not held of them": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held**2 * h) + 2 * b * h * V
        ),
    },
    "this is what the counter counts",
    given=_published,
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
