"""Chapter 4: quantization."""

import torch

from course.teaching.check.exercise import Choice, Exercise

# 1. The codes.


def _codes(x, bits):
    qmax = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True) / qmax
    return torch.round(x / scale)


def _scale(x, bits):
    return x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)


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
            lambda x, bits: torch.trunc(x / _scale(x, bits))
        ),
        "you rounded down instead of to the nearest: negative numbers drift": (
            lambda x, bits: torch.floor(x / _scale(x, bits))
        ),
        "you rounded up instead of to the nearest": lambda x, bits: torch.ceil(x / _scale(x, bits)),
        "that is not rounded yet: codes are whole numbers": lambda x, bits: x / _scale(x, bits),
        "those are the values after quantizing and back; asked for are the codes": (
            lambda x, bits: _codes(x, bits) * _scale(x, bits)
        ),
        "you multiplied by the scale: a code is the number divided by it": (
            lambda x, bits: torch.round(x * _scale(x, bits))
        ),
        "those are the scales; asked for are the codes": lambda x, bits: _scale(x, bits),
        "one bit is for the sign: with 8 bits the largest code is 2^7 - 1, not 2^8 - 1": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / (2**bits - 1)))
        ),
        "the largest code is 2^(bits - 1) - 1: one and not two less than the power": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 2)))
        ),
        "one bit is for the sign: the largest code is 2^(bits - 1) - 1, not 2^bits": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / 2**bits))
        ),
        "7 is the largest code of 4 bits only; with `bits` bits it is 2^(bits - 1) - 1": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / 7))
        ),
        "that is the line for one token in 4 bits: here each token has its scale, and bits vary": (
            lambda x, bits: torch.round(x / (x.abs().max() / 7))
        ),
        "return the codes only, without the scale": lambda x, bits: (_codes(x, bits), _scale(x, bits)),
        "return the codes only, and no scale before them": lambda x, bits: (_scale(x, bits), _codes(x, bits)),
        "the largest code is fixed at 127; with `bits` bits it is 2^(bits - 1) - 1": (
            lambda x, bits: torch.round(x / (x.abs().amax(-1, keepdim=True) / 127))
        ),
        "the zero point is moved to the minimum; here codes lie on both sides of 0": (
            lambda x, bits: torch.round(
                (x - x.amin(-1, keepdim=True))
                / ((x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / (2**bits - 1))
            )
        ),
        "one scale for each channel (over the tokens): every token is to have its own": (
            lambda x, bits: torch.round(x / (x.abs().amax(-2, keepdim=True) / (2 ** (bits - 1) - 1)))
        ),
        "the signs are lost: take the absolute value for the scale only": lambda x, bits: _codes(
            x, bits
        ).abs(),
        "the scale is the mean magnitude: the largest numbers get codes that do not exist": (
            lambda x, bits: torch.round(x / (x.abs().mean(-1, keepdim=True) / (2 ** (bits - 1) - 1)))
        ),
        "you rounded the scale, too: it stays a float": (
            lambda x, bits: torch.round(x / torch.round(_scale(x, bits)).clamp_min(1))
        ),
    },
    "the largest magnitude of each token becomes the largest code",
    signs={
        "the nearest code is at most half a step away, yours is up to a whole one: round": (
            lambda r, x, bits: 0.51 < (r - x / _scale(x, bits)).abs().max() < 1.01
        ),
        "a code is larger than the largest that `bits` bits hold": (
            lambda r, x, bits: r.abs().max() > 2 ** (bits - 1) - 1
        ),
    },
)


# 2. Two codes in a byte, with a bug.


def _unpack(packed):
    low, high = packed & 15, packed >> 4
    return torch.cat([low, high], dim=-1).to(torch.int8) - 8


def _as_found(packed):
    low = packed & 15
    high = packed & 240
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
        "that is the high half only: every byte holds two values": lambda p: (p >> 4).to(torch.int8) - 8,
        "the halves are interleaved: the first half of the channels lies in the low bits, side by side": (
            lambda p: torch.stack([p & 15, p >> 4], dim=-1).flatten(-2).to(torch.int8) - 8
        ),
        "the low half is not masked: it still has the high bits above it": (
            lambda p: torch.cat([p, p >> 4], dim=-1).to(torch.int8) - 8
        ),
        "the halves are joined along the first dimension; channels are the last": (
            lambda p: torch.cat([p & 15, p >> 4], dim=0).to(torch.int8) - 8
        ),
        "you shifted by three: four bits are a half of a byte": (
            lambda p: torch.cat([p & 15, p >> 3], dim=-1).to(torch.int8) - 8
        ),
        "you shifted by eight: nothing of a byte is left; a half has four bits": (
            lambda p: torch.cat([p & 15, p >> 8], dim=-1).to(torch.int8) - 8
        ),
        "you shifted to the left: the high half must come down, to the right": (
            lambda p: torch.cat([p & 15, p << 4], dim=-1).to(torch.int8) - 8
        ),
        "a half has 16 values: % 16 and // 16 take it apart, not 15": (
            lambda p: torch.cat([p % 15, p // 15], dim=-1).to(torch.int8) - 8
        ),
        "% 15 is not & 15: a half has 16 values, so the low one is % 16": (
            lambda p: torch.cat([p % 15, p // 16], dim=-1).to(torch.int8) - 8
        ),
        "// 15 is not >> 4: a half has 16 values, so the high one is // 16": (
            lambda p: torch.cat([p & 15, p // 15], dim=-1).to(torch.int8) - 8
        ),
        "the mask of four bits is 15, not 16": lambda p: (
            torch.cat([p & 16, p >> 4], dim=-1).to(torch.int8) - 8
        ),
        "the mask of four bits is 15, not 7": lambda p: torch.cat([p & 7, p >> 4], dim=-1).to(torch.int8) - 8,
        "you subtracted 8 while the bytes had no sign: below 8 they wrap around to 248 and more": (
            lambda p: torch.cat([p & 15, p >> 4], dim=-1) - 8
        ),
        "you subtracted 7: the codes are stored plus 8": (
            lambda p: torch.cat([p & 15, p >> 4], dim=-1).to(torch.int8) - 7
        ),
        "you subtracted 16: the codes are stored plus 8": (
            lambda p: torch.cat([p & 15, p >> 4], dim=-1).to(torch.int8) - 16
        ),
        "8 is taken from the low half only": (
            lambda p: torch.cat([(p & 15).to(torch.int8) - 8, (p >> 4).to(torch.int8)], dim=-1)
        ),
        "8 is taken from the high half only": (
            lambda p: torch.cat([(p & 15).to(torch.int8), (p >> 4).to(torch.int8) - 8], dim=-1)
        ),
        "you divided by 16 and kept the fraction: shift, or divide with //": (
            lambda p: torch.cat([(p & 15).float(), p / 16], dim=-1) - 8
        ),
        "the bytes were taken as signed before the shift: a high bit of 1 turns them negative": (
            lambda p: torch.cat([p & 15, p.to(torch.int8) >> 4], dim=-1) - 8
        ),
    },
    "two values of four bits in every byte",
    given=_as_found,
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
