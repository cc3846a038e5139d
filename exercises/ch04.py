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
