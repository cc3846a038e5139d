# ruff: noqa: E501 (a sentence is one line)
"""Chapter 4: quantization."""

import torch

from course.teaching.check.answer import same
from course.teaching.check.draw import whole
from course.teaching.check.exercise import Choice, Exercise

# 1. Two bits, arranged well: the keys of KIVI.


def _keys(
    over=1,
    levels=lambda bits: 2**bits - 1,
    low_of=lambda parts, over: parts.amin(over, keepdim=True),
    high_of=lambda parts, over: parts.amax(over, keepdim=True),
    to_whole=torch.round,
    back=lambda codes, scale, low: codes * scale + low,
    rest=lambda read, left: torch.cat([read, left]),
    guard=1e-30,
):
    """Keys of KIVI with one part exchanged."""

    def kivi_keys(k, bits, block):
        whole = len(k) // block * block
        parts = k[:whole].reshape(-1, block, k.shape[-1])  # [blocks, block, d]
        low, high = low_of(parts, over), high_of(parts, over)  # [blocks, 1, d]
        scale = (high - low) / levels(bits)
        codes = to_whole((parts - low) / scale.clamp_min(guard)) if guard else to_whole((parts - low) / scale)
        return rest(back(codes, scale, low).reshape(-1, k.shape[-1]), k[whole:])

    return kivi_keys


_kivi_keys = _keys()


def _symmetric(k, bits, block):
    whole = len(k) // block * block
    parts = k[:whole].reshape(-1, block, k.shape[-1])
    scale = parts.abs().amax(1, keepdim=True) / max(2 ** (bits - 1) - 1, 1)
    codes = torch.round(parts / scale.clamp_min(1e-30))
    return torch.cat([(codes * scale).reshape(-1, k.shape[-1]), k[whole:]])


def _short_block_too(k, bits, block):
    return torch.cat([_kivi_keys(part, bits, len(part)) for part in k.split(block)])


def _one_block(k, bits, block):
    whole = len(k) // block * block
    return torch.cat([_kivi_keys(k[:whole], bits, whole) if whole else k[:0], k[whole:]])


def _window_in_front(k, bits, block):
    left = len(k) % block
    return torch.cat([k[:left], _kivi_keys(k[left:], bits, block)])


def _same_ends(read, k, block, end):
    """Whether the smallest (or largest) value of each channel in each block is what it was."""
    whole = len(k) // block * block
    of_blocks = lambda x: end(x[:whole].unflatten(0, (-1, block)), 1)
    return not whole or same(of_blocks(read), of_blocks(k))


def _key_cases(draw):
    def keys(tokens, d, loud):
        made = torch.randn(tokens, d, generator=draw) + 0.7
        made[:, loud] *= 20  # a channel that is larger than the others, as in real keys
        return made

    still = keys(8, 4, 2)
    still[:, 1] = 1.5  # a channel that says the same at every token
    still[:4, 3] = 0.0
    return [
        (keys(4, 6, 1), 2, 4),
        (keys(12, 6, 3), 2, 4),
        (keys(16, 5, 0), whole(draw, 3, 4), 8),
        (keys(whole(draw, 9, 11), 6, 5), 2, 4),
        (keys(3, 6, 2), 2, 4),
        (still, 2, 4),
    ]


kivi_keys = Exercise(
    "kivi_keys",
    _kivi_keys,
    _key_cases,
    {
        "each token has a smallest and a largest value here, and the loud channel spoils the others: share by channel": (
            _keys(over=2)
        ),
        "a whole block shares one smallest and one largest value: every channel of a block needs its own": _keys(
            low_of=lambda parts, over: parts.amin((1, 2), keepdim=True),
            high_of=lambda parts, over: parts.amax((1, 2), keepdim=True),
        ),
        "a channel has one smallest and one largest value over all tokens: each block needs its own": _one_block,
        "you divide by 2^n: n bits have 2^n levels, and 2^n - 1 steps between them": _keys(
            levels=lambda bits: 2**bits
        ),
        "you divide by 2^(n-1) - 1: no code has a sign here, so there are 2^n - 1 steps": _keys(
            levels=lambda bits: 2 ** (bits - 1) - 1
        ),
        "the levels are fixed to those of 2 bits: use `bits`": _keys(levels=lambda bits: 3),
        "your levels are symmetric around zero: KIVI puts level 0 on the smallest value": _symmetric,
        "the codes are rounded down: round to the nearest": _keys(to_whole=torch.floor),
        "the codes are not rounded, so nothing was quantized": _keys(to_whole=lambda x: x),
        "the smallest value is not added back": _keys(back=lambda codes, scale, low: codes * scale),
        "those are the codes: return the numbers that are read back": _keys(
            back=lambda codes, scale, low: codes
        ),
        "the codes are not multiplied by their step before the smallest value is added": _keys(
            back=lambda codes, scale, low: codes + low
        ),
        "the last tokens are missing: tokens that fill no block stay as they are": _keys(
            rest=lambda read, left: read
        ),
        "the last tokens are quantized, too, and they fill no block yet: they stay as they are": _short_block_too,
        "your blocks begin too late: the first tokens fill the blocks, and the last ones are left over": _window_in_front,
        "the tokens that fill no block became zeros: they stay as they are": _keys(
            rest=lambda read, left: torch.cat([read, torch.zeros_like(left)])
        ),
        "a channel that never changes has a step of 0, and you divide by it": _keys(guard=0.0),
        "the tokens that are left over come first in your result: tokens keep their order": _keys(
            rest=lambda read, left: torch.cat([left, read])
        ),
    },
    "keys share by channel inside a block, and tokens that fill no block wait as they are",
    grows=(
        "one full block",
        "three blocks, each with numbers of its own",
        "other bits",
        "tokens that fill no block yet",
        "no full block at all",
        "one channel that never changes",
    ),
    signs={
        "the tokens that fill no block are changed: they stay as they are": lambda r, right, k, bits, block: (
            not same(r[len(k) // block * block :], k[len(k) // block * block :])
        ),
        "the full blocks are unchanged: quantize them": lambda r, right, k, bits, block: same(
            r[: len(k) // block * block], k[: len(k) // block * block]
        ),
        "a channel of a block takes more than 2^bits different values": lambda r, right, k, bits, block: any(
            len(values.unique()) > 2**bits
            for values in r[: len(k) // block * block].unflatten(0, (-1, block)).mT.flatten(0, 1)
        ),
        "the smallest value of a channel in a block must come back as it was: it is level 0": (
            lambda r, right, k, bits, block: not _same_ends(r, k, block, torch.amin)
        ),
        "the largest value of a channel in a block must come back as it was: it is the last level": (
            lambda r, right, k, bits, block: not _same_ends(r, k, block, torch.amax)
        ),
        "a number is not rounded to the nearest level": lambda r, right, k, bits, block: bool(
            ((r - k).abs() > (right - k).abs() + 1e-4).any()
        ),
    },
    shapes={
        "the result must have the shape of k, [tokens, d]: no token is lost, and none is added": lambda *case: (
            True
        ),
    },
)

# 2. The planted bug: a cast that cuts off.


def _coded(round_=torch.round, limit=lambda codes, n: codes.clamp(-n, n), step_of=lambda step: step):
    """Codes with one part exchanged."""
    return lambda x, step, largest: limit(round_(x / step_of(step)), largest)


def _numbers(draw):
    def made(tokens, channels, largest, beyond=0.0):
        x = torch.randn(tokens, channels, generator=draw) * torch.rand(tokens, 1, generator=draw) * 5
        step = (x.abs().amax(-1, keepdim=True) / largest).half().float()  # `largest` of them are exact
        x[0, 0] = step[0] * largest * (1 + beyond)  # a later token, larger than those that decided the step
        x[-1, -1] = -step[-1] * largest * (1 + beyond)
        return x, step, largest

    return [made(4, 8, 7), made(6, 16, 127), made(5, 12, 1), made(4, 8, 7, 0.6), made(3, 32, 7, 2.0)]


to_codes = Exercise(
    "to_codes",
    _coded(),
    _numbers,
    {
        "the cast cuts off the digits after the point, so every number moves toward zero: round first": (
            lambda x, step, largest: (x / step).int()
        ),
        "the limits are right, and the codes are still cut off toward zero: round to the nearest": _coded(
            torch.trunc
        ),
        "you round down: round to the nearest": _coded(torch.floor),
        "you round up: round to the nearest": _coded(torch.ceil),
        "you round away from zero: round to the nearest": _coded(lambda x: x.sign() * x.abs().ceil()),
        "you add a half and cut off the digits after the point: below zero that goes the wrong way": _coded(
            lambda x: (x + 0.5).trunc()
        ),
        "the codes are not rounded: a code is a whole number": _coded(lambda x: x),
        "the sign is lost: codes go from -largest to largest": _coded(lambda x: x.abs().round()),
        "a code lies beyond the limits: codes go from -largest to largest": _coded(
            limit=lambda codes, n: codes
        ),
        "the smallest code is -largest - 1 here: it is -largest": _coded(
            limit=lambda codes, n: codes.clamp(-n - 1, n)
        ),
        "there is no limit below: the smallest code is -largest": _coded(
            limit=lambda codes, n: codes.clamp(max=n)
        ),
        "there is no limit above: the largest code is largest": _coded(
            limit=lambda codes, n: codes.clamp(min=-n)
        ),
        "a code beyond the limit comes back at the other end: it must stay at the limit": _coded(
            limit=lambda codes, n: (codes + n) % (2 * n + 1) - n
        ),
        "your codes go from 0 to 2 * largest: they go from -largest to largest": _coded(
            limit=lambda codes, n: codes.clamp(-n, n) + n
        ),
        "you multiply by the step: a code says how many steps a number is, so divide": (
            lambda x, step, largest: (x * step).round().clamp(-largest, largest)
        ),
        "those are the numbers that will be read back: return the codes": (
            lambda x, step, largest: (x / step).round().clamp(-largest, largest) * step
        ),
        "the numbers are rounded before they are divided": (
            lambda x, step, largest: (x.round() / step).clamp(-largest, largest)
        ),
        "you cut before you divide: the limits are those of the codes": (
            lambda x, step, largest: (x.clamp(-largest, largest) / step).round()
        ),
        "all tokens share the largest step: each token has its own": _coded(step_of=lambda step: step.max()),
        "all tokens share the first token's step: each token has its own": _coded(
            step_of=lambda step: step[:1]
        ),
    },
    "to the nearest, and no further than the largest code",
    given=lambda x, step, largest: (x / step).int(),
    signs={
        "not all of these are whole numbers, and a code is one": lambda r, *case: not same(r, r.round()),
        "a code lies beyond the limits: codes go from -largest to largest": lambda r, right, x, step, largest: (
            (r.abs() > largest).any()
        ),
        "a code has the wrong sign": lambda r, right, *case: (r * right < 0).any(),
        "a code is more than half a step from its number": lambda r, right, x, step, largest: (
            (r - x / step).abs()[x.abs() <= largest * step] > 0.51
        ).any(),
        "the codes within the limits are right; those of numbers beyond them are not": (
            lambda r, right, x, step, largest: same(
                r[x.abs() <= largest * step], right[x.abs() <= largest * step]
            )
        ),
    },
    shapes={"return one code for each number of x, in its shape": lambda *case: True},
)

# 3. Decide: which format.

form = Choice(
    "form",
    "c",
    {
        "a": "2 + 16/128 = 2.125 bits are few, but int2 without a zero point has three levels. That is too coarse for answers that must stay the same",
        "b": "4 bits and almost nothing for the scale, but everyone shares a step of 10/7 = 1.4. The other channels lie between -1 and 1, so most of their numbers become 0",
        "c": "4 + 16/32 = 4.5 bits, and only 31 neighbours share the step of 1.4. The other 96 channels have steps of 1/7 = 0.14",
        "d": "8 bits are three more than you may spend, and the wide range is of no use between -10 and 10",
    },
)
