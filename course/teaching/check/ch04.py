"""Chapter 4: quantization."""

import torch

from .exercise import Choice, Exercise

# 1. The codes.


def _codes(x, bits):
    qmax = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / qmax
    return torch.round(x / scale)


def _vectors():
    generator = torch.Generator().manual_seed(4)
    return [
        (torch.randn(5, 8, generator=generator), 8),
        (torch.randn(3, 16, generator=generator) * 5, 4),
        (torch.randn(2, 4, 8, generator=generator) + 1, 4),
    ]


quantize = Exercise(
    "quantize",
    _codes,
    _vectors,
    {
        "the scale is on the wrong axis: every token (row) has a scale of its own, over its channels": (
            lambda x, bits: torch.round(x / (x.abs().amax(0, keepdim=True) / (2 ** (bits - 1) - 1)))
        ),
        "one scale for the whole tensor: every token is to have its own": (
            lambda x, bits: torch.round(x / (x.abs().max() / (2 ** (bits - 1) - 1)))
        ),
        "the largest code is too large by one: with 8 bits it is 127, not 128": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / 2 ** (bits - 1)))
        ),
        "you forgot the absolute value: the largest magnitude may be negative": (
            lambda x, bits: torch.round(x / (x.amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)))
        ),
        "you cut off instead of rounding: the error becomes twice as large": (
            lambda x, bits: torch.trunc(x / (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)))
        ),
    },
    "the largest magnitude of each token becomes the largest code",
)


# 2. Two codes in a byte, with a bug.


def _unpack(packed):
    low, high = packed & 15, packed >> 4
    return torch.cat([low, high], dim=-1).to(torch.int8) - 8


def _bytes():
    generator = torch.Generator().manual_seed(44)
    draw = lambda *shape: torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return [(draw(4),), (draw(3, 6),)]


unpack = Exercise(
    "unpack",
    _unpack,
    _bytes,
    {
        "the codes are unsigned here: subtract 8 to get -8 to 7": (
            lambda p: torch.cat([p & 15, p >> 4], dim=-1).to(torch.int8)
        ),
        "low and high halves are exchanged: the first half of the channels is in the low bits": (
            lambda p: torch.cat([p >> 4, p & 15], dim=-1).to(torch.int8) - 8
        ),
        "the high half still holds the low bits below it: shift it by four": (
            lambda p: torch.cat([p & 15, p & 240], dim=-1).to(torch.int8) - 8
        ),
        "that is one half only: every byte holds two values": lambda p: (p & 15).to(torch.int8) - 8,
    },
    "two values of four bits in every byte",
)

# 3. Design: which format.

form = Choice(
    "form",
    "c",
    {
        "a": "int2 without a zero point has three levels: too coarse for answers that must stay the same",
        "b": "one scale for a whole tensor lets the outlier channel set the step for all others",
        "c": "groups keep an outlier's large step to its neighbours, at 16 / group more bits per value",
        "d": "e5m2 has two bits of fraction; its wide range is of no use where values lie between -10 and 10",
    },
)
