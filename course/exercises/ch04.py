# ruff: noqa: E501 (a sentence is one line)
"""Chapter 4: quantization."""

import torch

from course.teaching.check.answer import same
from course.teaching.check.draw import whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. Two bits, arranged well: the keys of KIVI.


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
        (keys(8, 5, 2), 6, 4),
    ]


kivi_keys = Exercise(
    "kivi_keys",
    RIGHT["kivi_keys"],
    _key_cases,
    MISTAKES["kivi_keys"],
    "keys share by channel inside a block, and tokens that fill no block wait as they are",
    grows=(
        "one full block",
        "three blocks, each with numbers of its own",
        "other bits",
        "tokens that fill no block yet",
        "no full block at all",
        "one channel that never changes",
        "six bits",
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
        "a number is not at the nearest of the 2^n levels: is their number right, and the rounding?": lambda r, right, k, bits, block: (
            bool(((r - k).abs() > (right - k).abs() + 1e-4).any())
        ),
    },
    shapes={
        "return the shape of k, [tokens, d]: no token is lost, and none is added": lambda *case: True,
    },
)

# 2. The planted bug: a cast that cuts off.


def _numbers(draw):
    def made(tokens, channels, largest, beyond=0.0):
        x = torch.randn(tokens, channels, generator=draw) * torch.rand(tokens, 1, generator=draw) * 5
        step = (x.abs().amax(-1, keepdim=True) / largest).half().float()  # `largest` of them are exact
        x[0, 0] = step[0] * largest * (1 + beyond)  # a later token, larger than those that decided the step
        x[-1, -1] = -step[-1] * largest * (1 + beyond)
        return x, step, largest

    return [
        made(4, 8, 7),
        made(6, 16, 127),
        made(5, 12, 1),
        made(4, 8, 7, 0.6),
        made(3, 32, 7, 30.0),
        made(4, 8, 127, 0.6),
    ]


to_codes = Exercise(
    "to_codes",
    RIGHT["to_codes"],
    _numbers,
    MISTAKES["to_codes"],
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
