# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 4: quantization."""

import torch

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


def _key_cases():
    draw = torch.Generator().manual_seed(4)

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
        (keys(8, 5, 0), 4, 8),
        (keys(11, 6, 5), 2, 4),
        (keys(3, 6, 2), 2, 4),
        (still, 2, 4),
    ]


kivi_keys = Exercise(
    "kivi_keys",
    _kivi_keys,
    _key_cases,
    {
        "a smallest and a largest value for each token: the loud channel spoils all others; share by channel": (
            _keys(over=2)
        ),
        "one smallest and one largest value for a whole block: every channel of a block has its own": _keys(
            low_of=lambda parts, over: parts.amin((1, 2), keepdim=True),
            high_of=lambda parts, over: parts.amax((1, 2), keepdim=True),
        ),
        "one pair for a channel over all tokens: each block has its own, so that it is written once": _one_block,
        "n bits have 2^n levels, and 2^n - 1 steps between them: divide by the steps": _keys(
            levels=lambda bits: 2**bits
        ),
        "no sign is needed here, the smallest value is level 0: there are 2^n - 1 steps, not 2^(n-1) - 1": _keys(
            levels=lambda bits: 2 ** (bits - 1) - 1
        ),
        "the levels are fixed to those of 2 bits: use `bits`": _keys(levels=lambda bits: 3),
        "that is symmetric, around zero; KIVI puts level 0 on the smallest value": _symmetric,
        "the codes are cut off, not rounded: the error becomes up to a whole step": _keys(
            to_whole=torch.floor
        ),
        "the codes are not rounded: nothing was quantized": _keys(to_whole=lambda x: x),
        "the smallest value is not added back: all numbers stand too low": _keys(
            back=lambda codes, scale, low: codes * scale
        ),
        "those are the codes; asked for are the numbers that are read back": _keys(
            back=lambda codes, scale, low: codes
        ),
        "the codes are not multiplied with their step before the smallest value is added": _keys(
            back=lambda codes, scale, low: codes + low
        ),
        "the last tokens are missing: what fills no block stays as it is": _keys(
            rest=lambda read, left: read
        ),
        "the last tokens are no full block yet: they stay as they are": _short_block_too,
        "the first tokens fill the blocks; what is left over are the last ones": _window_in_front,
        "the tokens that fill no block became zeros; they stay as they are": _keys(
            rest=lambda read, left: torch.cat([read, torch.zeros_like(left)])
        ),
        "a channel that says the same at every token divides by zero: its step is 0": _keys(guard=0.0),
        "the window stands before the blocks: tokens stay in their order": _keys(
            rest=lambda read, left: torch.cat([left, read])
        ),
    },
    "keys share by channel inside a block, and what fills no block waits as it is",
    grows=(
        "one full block",
        "three blocks, each with numbers of its own",
        "other bits",
        "tokens that fill no block yet",
        "no full block at all",
        "one channel that never changes",
    ),
)

# 2. The planted bug: a cast that cuts off.


def _coded(round_=torch.round, limit=lambda codes, n: codes.clamp(-n, n), step_of=lambda step: step):
    """Codes with one part exchanged."""
    return lambda x, step, largest: limit(round_(x / step_of(step)), largest)


def _numbers():
    draw = torch.Generator().manual_seed(24)

    def made(tokens, channels, largest, beyond=0.0):
        x = torch.randn(tokens, channels, generator=draw) * torch.rand(tokens, 1, generator=draw) * 5
        step = x.abs().amax(-1, keepdim=True) / largest
        x[0, 0] = x[0].abs().amax() * (1 + beyond)  # a later token, larger than those that decided the step
        x[-1, -1] = -x[-1].abs().amax() * (1 + beyond)
        return x, step, largest

    return [made(4, 8, 7), made(6, 16, 127), made(5, 12, 1), made(4, 8, 7, 0.6), made(3, 32, 7, 2.0)]


to_codes = Exercise(
    "to_codes",
    _coded(),
    _numbers,
    {
        "the cast cuts off what stands behind the point, so every number moves toward zero: round first": (
            lambda x, step, largest: (x / step).int()
        ),
        "within the limits, and still cut off toward zero: round to the nearest whole number": _coded(
            torch.trunc
        ),
        "that rounds down, below zero too: all numbers move to one side, by half a step on average": _coded(
            torch.floor
        ),
        "that rounds up: all numbers move to one side, by half a step on average": _coded(torch.ceil),
        "that rounds away from zero: every number becomes larger than it was": _coded(
            lambda x: x.sign() * x.abs().ceil()
        ),
        "a half is added and the rest cut off: below zero that goes the wrong way": _coded(
            lambda x: (x + 0.5).trunc()
        ),
        "not rounded: a code is a whole number": _coded(lambda x: x),
        "the sign is lost: codes go from -largest to largest": _coded(lambda x: x.abs().round()),
        "a number beyond the scale gets a code that does not exist: the largest one is `largest`": _coded(
            limit=lambda codes, n: codes
        ),
        "the smallest code is -largest: zero lies in the middle": _coded(
            limit=lambda codes, n: codes.clamp(-n - 1, n)
        ),
        "the limit holds above only: there is a smallest code, too": _coded(
            limit=lambda codes, n: codes.clamp(max=n)
        ),
        "the limit holds below only: there is a largest code, too": _coded(
            limit=lambda codes, n: codes.clamp(min=-n)
        ),
        "what lies beyond begins anew at the other end: a very large number becomes a very small one": _coded(
            limit=lambda codes, n: (codes + n) % (2 * n + 1) - n
        ),
        "codes are counted from zero here; they go from -largest to largest": _coded(
            limit=lambda codes, n: codes.clamp(-n, n) + n
        ),
        "multiplied by the step; a code says how many steps a number is, so divide": (
            lambda x, step, largest: (x * step).round().clamp(-largest, largest)
        ),
        "those are the numbers that will be read back; asked for are the codes": (
            lambda x, step, largest: (x / step).round().clamp(-largest, largest) * step
        ),
        "the numbers are rounded before they are divided": (
            lambda x, step, largest: (x.round() / step).clamp(-largest, largest)
        ),
        "the limits are those of the codes: divide and round first, then cut": (
            lambda x, step, largest: (x.clamp(-largest, largest) / step).round()
        ),
        "one step serves all tokens here; each token has its own": _coded(step_of=lambda step: step.max()),
        "the first token's step serves all; each token has its own": _coded(step_of=lambda step: step[:1]),
    },
    "to the nearest, and no further than the largest code",
    given=lambda x, step, largest: (x / step).int(),
    signs={
        "not all of these are whole numbers, and a code is one": lambda r, x, step, largest: (
            not torch.equal(r.double(), r.double().round())
        ),
        "no code is further from zero than its number: something is cut off": lambda r, x, step, largest: (
            bool((r.abs() <= (x / step).abs() + 1e-4).all())
        ),
        "there is a code beyond `largest`": lambda r, x, step, largest: bool((r.abs() > largest).any()),
        "a code is more than half a step from its number": lambda r, x, step, largest: bool(
            ((r - x / step).abs()[x.abs() <= largest * step] > 0.51).any()
        ),
    },
)

# 3. Decide: which format.

form = Choice(
    "form",
    "c",
    {
        "a": "2 + 16/128 = 2.125 bits are few, but int2 without a zero point has three levels: too coarse for "
        "answers that must stay the same",
        "b": "4 bits and next to nothing for the scale, but a step of 10/7 = 1.4 for everybody: the other channels "
        "lie between -1 and 1, and most of them become 0",
        "c": "4 + 16/32 = 4.5 bits, and the step of 1.4 is that of 31 neighbours; the other 96 channels have steps "
        "of 1/7 = 0.14",
        "d": "8 bits are three more than you may spend; and its wide range is of no use between -10 and 10",
    },
)
