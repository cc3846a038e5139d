"""Store: how numbers are written down. Codes are computed in fp32, so that they compare bit by bit."""

import functools
import itertools
import math
import random

import torch
from torch import Tensor

FLOATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0)}  # bits of exponent, of fraction; largest value


def half_up(number: float) -> float:
    """The smallest fp16 number that is not below this one."""
    half = torch.tensor(number).half()
    return float(half if half.float() >= number else torch.nextafter(half, torch.tensor(math.inf).half()))


def groups(shape, axis: str, group: int | None = None) -> list[list[tuple[int, int, int]]]:
    """Every set of values that share a scale, as (head, token, channel), in one row's K or V.

    shape: KV heads, tokens, head dimension. axis: "group": `group` neighbouring channels of a token's vector,
    "token": the vector, "channel": one channel of a head over all tokens, "tensor": everything.
    """
    heads, tokens, width = shape
    found = {}
    for h in range(heads):
        for t in range(tokens):
            for c in range(width):
                named = {"group": (h, t, c // (group or width)), "token": (h, t), "channel": (h, c)}
                found.setdefault(named.get(axis), []).append((h, t, c))
    return list(found.values())


def integer_scale(values: Tensor, bits: int, symmetric: bool = True, rounded=half_up):
    """(scale, zero) of values that share them: the step between levels, and the value of the lowest level.

    Symmetric: as many levels below 0 as above, no zero. `rounded` up (zero: down), so that all values lie
    within the levels (Jacob et al. 2018, section 2.1). rounded: how a scale is written down.
    """
    if symmetric:
        return rounded(float(values.abs().max() / (2 ** (bits - 1) - 1))), None
    zero = -rounded(-float(values.min()))
    return rounded(float((values.max() - zero) / (2**bits - 1))), zero


def integer_codes(values: Tensor, bits: int, scale: float, zero: float | None) -> Tensor:
    """The nearest level, half to even; -2 ** (bits - 1) is the lowest, and what lies beyond is clipped."""
    scale = scale or 1.0  # all values are 0, or all are `zero`
    if zero is None:
        most = 2 ** (bits - 1) - 1
        return torch.round(values / scale).clamp(-most, most)
    return torch.round((values - zero) / scale).clamp(0, 2**bits - 1) - 2 ** (bits - 1)


def integer_numbers(codes: Tensor, bits: int, scale: float, zero: float | None) -> Tensor:
    """The values of the levels."""
    return codes * scale if zero is None else (codes + 2 ** (bits - 1)) * scale + zero


def integers(x: Tensor, first: int, bits: int, axis="group", group=None, symmetric=True, rounded=half_up):
    """Codes and numbers of one row's K or V, `[kv_heads, tokens, head_dim]` each.

    first: tokens of the prompt, which fix a scale that is shared over tokens.
    """
    codes, numbers = torch.zeros_like(x), torch.zeros_like(x)
    for members in groups(x.shape, axis, group):
        all_of_them = tuple(zip(*members, strict=True))
        decide = [member for member in members if member[1] < first] or members
        numbers_of = integer_scale(x[tuple(zip(*decide, strict=True))], bits, symmetric, rounded)
        codes[all_of_them] = integer_codes(x[all_of_them], bits, *numbers_of)
        numbers[all_of_them] = integer_numbers(codes[all_of_them], bits, *numbers_of)
    return codes, numbers


def pack(codes: list[int], bits: int) -> list[int]:
    """4- or 2-bit codes of a vector in bytes: byte i holds codes i, i + n, i + 2n, ..., lowest bits first,
    n being the number of bytes; each as a number from 0 on. ValueError for a width that does not divide 8."""
    if 8 % bits:
        raise ValueError(f"bits={bits}: does not divide 8")
    size = len(codes) * bits // 8
    packed = []
    for i in range(size):
        byte = 0
        for place in range(8 // bits):
            byte += (codes[i + place * size] + 2 ** (bits - 1)) << (bits * place)
        packed.append(byte)
    return packed


def planes(codes: list[int], bits: int) -> list[int]:
    """Codes of 3, 5, 6 or 7 bits in bytes: their lowest 4 bits packed as above, then the next 2, then the
    last one, so far as the width has them; a short last byte is filled up with zeros."""
    unsigned, packed = [code + 2 ** (bits - 1) for code in codes], []
    for width in (4, 2, 1):
        if bits & width:
            plane = [code % 2**width for code in unsigned]
            plane += [0] * (-len(plane) % (8 // width))
            packed += pack([code - 2 ** (width - 1) for code in plane], width)
            unsigned = [code >> width for code in unsigned]
    return packed


@functools.cache
def float8_value(byte: int, form: str) -> float:
    """What the bits of e4m3 or e5m2 mean (Micikevicius et al. 2022, table 1): sign, exponent, fraction."""
    exponent_bits, fraction_bits, _ = FLOATS[form]
    bias, sign = 2 ** (exponent_bits - 1) - 1, -1.0 if byte >= 128 else 1.0
    exponent, fraction = byte % 128 >> fraction_bits, byte % 2**fraction_bits / 2**fraction_bits
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias)
    return sign * (1 + fraction) * 2.0 ** (exponent - bias)


def float8_byte(number: float, form: str) -> int:
    """The byte whose value is nearest, the even one of two; beyond the largest value, the largest."""
    values = [float8_value(byte, form) for byte in range(128)]  # above the largest: infinity or NaN
    allowed = [byte for byte in range(128) if values[byte] <= FLOATS[form][2]]
    best = min(allowed, key=lambda byte: (abs(values[byte] - abs(number)), byte % 2))
    return best + (128 if math.copysign(1, number) < 0 else 0)


def floats(x: Tensor, first: int, form: str, axis: str | None = None, group=None, rounded=half_up):
    """Bytes and numbers of one row's K or V, as in `integers`; axis None: without a scale.

    A scale brings the largest value of what shares it to the format's largest.
    """
    codes, numbers = torch.zeros_like(x), torch.zeros_like(x)
    for members in groups(x.shape, axis or "group", group):
        all_of_them = tuple(zip(*members, strict=True))
        decide = [member for member in members if member[1] < first] or members
        largest = float(x[tuple(zip(*decide, strict=True))].abs().max() / FLOATS[form][2])
        scale = rounded(largest) if axis else 1.0
        found = [float8_byte(number, form) for number in (x[all_of_them] / (scale or 1.0)).tolist()]
        codes[all_of_them] = torch.tensor(found, dtype=x.dtype)
        values = torch.tensor([float8_value(byte, form) for byte in found], dtype=x.dtype)
        numbers[all_of_them] = values * scale
    return codes, numbers


FOUR = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the sizes of e2m1, in the order of their codes


def float4_codes(values: Tensor, form: str, largest: int) -> tuple[list[int], Tensor]:
    """Codes and numbers of one block of mxfp4 or nvfp4 whose largest value becomes about `largest`.

    mxfp4 (OCP 2023, section 6.3): the scale is 2^(floor(log2 of the largest value) - 2). nvfp4: it is the
    largest value / `largest`, as the nearest e4m3. Each value gets the nearest code, the even one of two.
    """
    most = values.abs().max()
    if form == "mxfp4":
        scale = 2.0 ** (math.floor(math.log2(float(most))) - 2) if most > 0 else 0.0
    else:
        scale = float8_value(float8_byte(float(most / largest), "e4m3"), "e4m3")
    codes = []
    for value, size in zip(values.tolist(), (values.abs() / (scale or 1.0)).tolist(), strict=True):
        code = min(range(8), key=lambda i: (abs(FOUR[i] - size), i % 2))
        codes.append(code + 8 if value < 0 else code)
    signed = [FOUR[code % 8] * (-1 if code >= 8 else 1) for code in codes]
    return codes, torch.tensor(signed, dtype=values.dtype) * scale


def float4(x: Tensor, first: int, form: str, four_or_six: bool = False):
    """Codes 0 to 15 and numbers of one row's K or V, as in `integers`: blocks of 16 (nvfp4) or 32 (mxfp4)
    neighbouring channels of a token, the last one as long as it gets.

    four_or_six: each block's largest value becomes 4 where that errs less (Cook et al. 2025, section 3).
    """
    codes, numbers = torch.zeros_like(x), torch.zeros_like(x)
    for head, token in itertools.product(range(x.shape[0]), range(x.shape[1])):
        for start in range(0, x.shape[2], 16 if form == "nvfp4" else 32):
            block = slice(start, start + (16 if form == "nvfp4" else 32))
            values = x[head, token, block]
            tried = [float4_codes(values, form, largest) for largest in ((6, 4) if four_or_six else (6,))]
            found = min(tried, key=lambda one: float((one[1] - values).double().square().sum()))
            codes[head, token, block] = torch.tensor(found[0], dtype=x.dtype)
            numbers[head, token, block] = found[1]
    return codes, numbers


def nearest_means(levels: list[float], head_dim: int, cells: int = 100_000) -> list[float]:
    """For every level the mean of what is nearest to it, among channels of random vectors of head_dim
    channels and root mean square 1. Lloyd's and Max's levels are those for which that is the level itself.

    Such a channel has the density (1 - x^2 / head_dim)^((head_dim - 3) / 2) (Zandieh et al. 2025, lemma 1).
    """
    edge, sums, counts, at = min(math.sqrt(head_dim), 9.0), [0.0] * len(levels), [0.0] * len(levels), 0
    for i in range(cells):
        x = (2 * (i + 0.5) / cells - 1) * edge
        while at + 1 < len(levels) and x > (levels[at] + levels[at + 1]) / 2:
            at += 1
        weight = (1 - x * x / head_dim) ** ((head_dim - 3) / 2)
        sums[at] += weight * x
        counts[at] += weight
    return [total / count for total, count in zip(sums, counts, strict=True)]


def codebook(x: Tensor, first: int, levels: Tensor):
    """Codes from 0 and numbers of one row's K or V: of every vector its root mean square, in fp16, and of
    every channel the nearest level times that, the lower one of two."""
    codes, numbers = torch.zeros_like(x), torch.zeros_like(x)
    for head, token in itertools.product(range(x.shape[0]), range(x.shape[1])):
        vector = x[head, token]
        size = torch.tensor(math.sqrt(math.fsum(v * v for v in vector.tolist()) / len(vector))).half().float()
        borders = (levels[1:] + levels[:-1]) / 2
        for channel, value in enumerate(vector / (size or 1.0)):
            code = sum(1 for border in borders if value > border)
            codes[head, token, channel] = code
            numbers[head, token, channel] = levels[code] * size
    return codes, numbers


def means(numbers: list[float], count: int, rounds: int = 50) -> list[float]:
    """k-means of one-dimensional numbers: from the middles of `count` equal parts of the sorted numbers, each
    mean becomes that of the numbers nearest to it (the lower of two), until nothing changes."""
    numbers = sorted(numbers)
    found, before = [numbers[int((i + 0.5) / count * len(numbers))] for i in range(count)], None
    for _ in range(rounds):
        mine = [[] for _ in found]
        for x in numbers:
            mine[sum(1 for a, b in itertools.pairwise(found) if x > (a + b) / 2)].append(x)
        if mine == before:
            break
        before = mine
        found = [math.fsum(xs) / len(xs) if xs else old for xs, old in zip(mine, found, strict=True)]
    return found


def nonuniform(x: Tensor, first: int, bits: int, axis: str, part: float = 0.01):
    """KVQuant's codes and numbers (Hooper et al. 2024, section 3) of one row's K before RoPE (axis "channel")
    or V ("token"), `[kv_heads, tokens, head_dim]`; ranges and levels come from the `first` tokens.

    Every number is brought to [-1, 1]: by its channel's smallest and largest number but for half a `part`
    of them on either side, or by those of its vector but for the outliers. In each vector the outliers,
    ceil(part * head_dim) of the largest, are exact; the others get the nearest of 2^bits levels, the means of
    the prompt's numbers.
    """
    heads, tokens, width = x.shape
    low, high = torch.zeros_like(x), torch.zeros_like(x)
    if axis == "channel":
        away = min(math.ceil(part / 2 * first), (first - 1) // 2)
        ranked = x[:, :first].sort(dim=1).values
        low[:], high[:] = ranked[:, None, away], ranked[:, None, first - 1 - away]
    y = torch.nan_to_num((x - (high + low) / 2) / ((high - low) / 2)) if axis == "channel" else x
    outliers = torch.zeros_like(x, dtype=torch.bool)
    for h, t in itertools.product(range(heads), range(tokens)):
        order = sorted(range(width), key=lambda c: (-abs(float(y[h, t, c])), c))
        outliers[h, t, order[: math.ceil(part * width)]] = True
        if axis == "token":
            rest = x[h, t][~outliers[h, t]]
            low[h, t], high[h, t] = rest.min().half().float(), rest.max().half().float()
    y = torch.nan_to_num((x - (high + low) / 2) / ((high - low) / 2)).clamp(-1, 1)
    dense = y[:, :first][~outliers[:, :first]].tolist()
    levels = torch.tensor(means(dense, 2**bits))
    codes = sum((y > (a + b) / 2).to(x.dtype) for a, b in itertools.pairwise(levels))
    numbers = levels[codes.long()] * ((high - low) / 2) + (high + low) / 2
    return codes, torch.where(outliers, x.half().float(), numbers)


def kivi_written(tokens: int, prompt: int, group: int, recent: int) -> int:
    """KIVI: how many of a row's `tokens` are quantized, the rest being held as they are.

    Blocks of `group` tokens, counted from `recent` tokens before the end of the prompt, as soon as `recent`
    tokens follow them.
    """
    end = prompt - recent
    while end + group + recent <= tokens:
        end += group
    return max(0, end)


def kivi(x: Tensor, prompt: int, bits: int, group: int, recent: int, channels: int | None = None) -> Tensor:
    """KIVI (Liu et al. 2024, section 3.2): one head's K or V `[tokens, head_dim]` as it is held.

    K (channels None): a block of tokens shares a scale and a zero channel by channel; the oldest block may be
    short. V: so many neighbouring channels of a token do.
    """
    held, written = x.clone(), kivi_written(len(x), prompt, group, recent)
    blocks = {}
    for token in range(written):
        blocks.setdefault((token - (prompt - recent)) // group, []).append(token)
    for tokens in blocks.values():
        axis = "channel" if channels is None else "group"
        held[tokens] = integers(x[None, tokens], len(tokens), bits, axis, channels, symmetric=False)[1][0]
    return held


def signs(head_dim: int) -> list[int]:
    """QuaRot's random signs, one a channel (Ashkboos et al. 2024, section 3): drawn once, for all heads."""
    draw = random.Random(0)
    return [1 if draw.random() < 0.5 else -1 for _ in range(head_dim)]


def turned(x: Tensor, signs: list[int], back: bool = False) -> Tensor:
    """Vectors `[..., head_dim]` times the Walsh-Hadamard matrix, in blocks of n channels, the largest power
    of two that divides head_dim: channel j becomes the sum of (-1)^(ones that i and j share) x_i / sqrt(n).

    signs: of each channel before it is turned; back: the other way round.
    """
    width = x.shape[-1]
    size = next(n for n in range(width, 0, -1) if width % n == 0 and n.bit_count() == 1)
    found = []
    for vector in x.reshape(-1, width).tolist():
        for j in range(width):
            start = j - j % size
            terms = []
            for i in range(start, start + size):
                sign = (-1) ** (i % size & j % size).bit_count()
                terms.append(vector[i] * sign * signs[j if back else i])
            found.append(math.fsum(terms) * size**-0.5)
    return torch.tensor(found, dtype=x.dtype).view(x.shape)


def rotated(x: Tensor, first: int, quantize, signs: list[int] | None = None):
    """Codes and numbers of one row's K or V whose vectors are turned, quantized by `quantize(x, first)`, and
    turned back when they are read."""
    signs = signs or [1] * x.shape[-1]
    codes, numbers = quantize(turned(x, signs), first)
    return codes, turned(numbers, signs, back=True)


def smoothing(keys: Tensor, strength: float) -> Tensor:
    """SmoothQuant's factors for K (Xiao et al. 2023, section 4), `[head_dim]`: what divides each channel.

    keys `[tokens, head_dim]` of the prompt. A channel's factor is (its largest magnitude / the geometric mean
    of all) ^ strength; a channel below a thousandth of the largest counts as that.
    """
    size = [float(channel.abs().max()) for channel in keys.T]
    logs = [math.log(max(channel, max(size) / 1000) or 1.0) for channel in size]
    return torch.tensor([math.exp(strength * (log - sum(logs) / len(logs))) for log in logs])
