"""Int: packed integers of 2 to 8 bits with shared scales.

The chain: the largest value of every group (`Scales.reduce`), its scale (`Int.fit`), codes (`Int.quantize`),
bytes (`pack`); and back: `unpack`, `Int.dequantize`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ..late import later
from ..parameters import check_bool, check_one_of, check_whole
from .exact import Exact, Parts
from .planes import check_width, pack, sizes, unpack

AXES = ("group", "token", "channel", "tensor")
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
NONFINITE = ("refuse", "clip")


@dataclass(frozen=True)
class Int(Exact):
    """Integers with shared scales: int8, int4 (two values per byte), int2 (four), and the widths between.

    Symmetric: x ~ code * scale, scale = absmax / qmax with qmax = 127, 7 or 1; zero stays zero. Asymmetric:
    x ~ code * scale + zero, from the smallest value to the largest; `zero` is the value of code 0. The scale
    is rounded *up* (and `zero` down), so that the error is at most half a step.

    bits: 2 to 8 bits per value. group, axis, scale (its dtype): see `Scales`.
    symmetric: False stores a zero point beside each scale. nonfinite: "refuse" NaN, infinity and values too
    large for the scale's dtype (ValueError naming the head), or "clip" them to the largest value. The default
    cost is bits + 16 / head_dim bits per value. Parts: codes, scale and, if asymmetric, zero point.
    A width that does not divide 8 has the lowest 4 bits of all codes in one run of bytes, the next 2 in
    another, the last one in a third: of 5 bits two codes share a byte of the first plane, eight one of the
    second, and nothing is wasted (as in llama.cpp's q5_0, which packs 32 such codes in 16 + 4 bytes).
    """

    bits: int = 8
    group: int | None = None
    axis: str = "group"
    symmetric: bool = True
    scale: str = "fp16"
    nonfinite: str = "refuse"

    def __post_init__(self):
        check_one_of("bits", self.bits, range(2, 9))
        check_bool("symmetric", self.symmetric)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        object.__setattr__(self, "scales", Scales(self.axis, self.group, self.scale))

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def over_heads(self) -> bool:
        return self.scales.axis == "tensor"

    @property
    def fixed_parts(self) -> int:
        return self.scales.fixed * (1 if self.symmetric else 2)

    def check(self, head_dim: int) -> None:
        self.scales.check(head_dim)
        check_width(self.bits, head_dim)

    @property
    def highest(self) -> float:
        """The largest absolute value that can be stored."""
        most = torch.finfo(self.scales.dtype).max
        if self.scales.dtype == torch.float16:
            return most * (self.qmax if self.symmetric else 1)
        return most / 2  # so that the span and the decoded numbers, up to a step larger, are finite

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        return admit(f"int{self.bits}", x.float(), self.highest, self.nonfinite)

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        if not self.scales.fixed:
            return None
        step = fixed[0].float().clamp(min=self.scales.smallest)
        least, most = (-self.qmax, self.qmax) if self.symmetric else (0, 2**self.bits - 1)
        code = x / step if self.symmetric else (x - fixed[1].float()) / step
        return (code < least - 0.5) | (code > most + 0.5)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        numbers = fixed or self.fit(x, real)  # the scale of every group: its largest value / qmax
        codes = self.quantize(x, numbers)  # value / scale, rounded
        return pack(codes, self.bits), *numbers

    def fit(self, x: Tensor, real: Tensor | None = None) -> Parts:
        """(scale,) or (scale, zero) of every group of x, shaped as in `Scales.reduce`."""
        dtype = self.scales.dtype
        if self.symmetric:
            return (round_up(self.scales.reduce(x.abs(), True, real) / self.qmax, dtype),)
        zero = round_down(self.scales.reduce(x, False, real), dtype)
        span = self.scales.reduce(x, True, real) - zero.float()
        return round_up(span / (2**self.bits - 1), dtype), zero

    def quantize(self, x: Tensor, numbers: Parts) -> Tensor:
        """int8 codes of x, fp32, not packed."""
        step = self.scales.spread(numbers[0].float().clamp(min=self.scales.smallest), x)
        if self.symmetric:
            codes = torch.round(x / step)
            codes = codes.clamp_(-self.qmax, self.qmax) if self.scales.fixed else codes
        else:
            codes = torch.round((x - self.scales.spread(numbers[1].float(), x)) / step)
            codes = codes.clamp_(0, 2**self.bits - 1) - 2 ** (self.bits - 1)
        return codes.to(torch.int8)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes, *numbers = unpack(parts[0], self.bits), *parts[1:]
        if self.scales.fixed:
            return self.numbers(codes, numbers, dtype)
        codes = codes.unflatten(-1, (numbers[0].shape[-1], -1))  # [batch, kv_heads, tokens, groups, group]
        return self.numbers(codes, [n.unsqueeze(-1) for n in numbers], dtype).flatten(-2)

    def numbers(self, codes: Tensor, scales, dtype: torch.dtype) -> Tensor:
        """The values of int8 codes, by their scales (and zero points), in shapes that fit."""
        wide = torch.promote_types(dtype, torch.float32) if self.spans_more(dtype) else dtype
        scales = [n.to(codes.device, wide) for n in scales]
        return within(self.dequantize(codes.to(wide), scales), dtype)

    def spans_more(self, dtype: torch.dtype) -> bool:
        """Whether a scale, or a code's distance from the zero point, may be none that `dtype` holds."""
        return dtype == torch.float16 and (not self.symmetric or self.scales.dtype == torch.float32)

    def dequantize(self, codes: Tensor, numbers) -> Tensor:
        """Numbers again, in place; codes not packed, in the dtype wanted."""
        if self.symmetric:
            return codes.mul_(numbers[0])
        return codes.add_(2 ** (self.bits - 1)).mul_(numbers[0]).add_(numbers[1])

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        codes = 8 * sum(sizes(shape[2], self.bits)) / shape[2]
        return codes + (1 if self.symmetric else 2) * self.scales.bits_per_value(shape)


@dataclass(frozen=True)
class Scales:
    """Which values share a scale, and how it is written down.

    axis: "group": `group` neighbouring channels of one token. "token": one token's vector in one KV head.
    "channel": one channel of one KV head. "tensor": all of K, or all of V, of a layer and row. The last two
    share a scale over tokens, so the first tokens stored (the prompt) fix it; later values beyond it are
    clipped, and nothing is ever re-quantized.
    group: channels, for axis="group" (default: all of head_dim). scale: its dtype, "fp16" or "fp32".
    Raises ValueError for anything else.
    """

    axis: str = "group"
    group: int | None = None
    scale: str = "fp16"

    def __post_init__(self):
        check_one_of("axis", self.axis, AXES)
        check_one_of("scale", self.scale, DTYPES)
        if self.group is not None:
            check_whole("group", self.group, 1, "channels")
            if self.axis != "group":
                raise ValueError(f"group={self.group}: only with axis='group', not {self.axis!r}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.scale]

    @property
    def fixed(self) -> bool:
        """Whether the first tokens decide for all later ones."""
        return self.axis in ("channel", "tensor")

    @property
    def smallest(self) -> float:
        """The smallest scale above zero."""
        return 2**-24 if self.dtype == torch.float16 else torch.finfo(self.dtype).tiny

    def check(self, head_dim: int) -> None:
        """ValueError for a group that does not divide the head dimension."""
        if self.group is not None and head_dim % self.group:
            raise ValueError(f"group={self.group}: does not divide the head dimension {head_dim}")

    def reduce(self, x: Tensor, largest: bool, real: Tensor | None = None) -> Tensor:
        """The largest (or smallest) value of every group of x `[batch, kv_heads, tokens, head_dim]`.

        Shapes: group `[.., tokens, groups]`, token `[.., tokens, 1]`, channel `[.., 1, head_dim]`, tensor
        `[batch, 1, 1, 1]`. real `[batch, tokens]`: tokens that count where a group runs over tokens.
        """
        pick = torch.amax if largest else torch.amin
        if not self.fixed:
            return pick(x.unflatten(-1, (-1, self.group or x.shape[-1])), -1)
        if real is not None:
            padding = ~real.to(x.device)[:, None, :, None]
            x = x.masked_fill(padding, -torch.inf if largest else torch.inf)
            x = torch.where(padding.all(2, keepdim=True), 0.0, x)  # a row that begins later
        return pick(x, (2,) if self.axis == "channel" else (1, 2, 3), keepdim=True)

    def spread(self, scale: Tensor, like: Tensor) -> Tensor:
        """One number per value: `scale` as `reduce` returns it, fit to multiply `like`."""
        if self.fixed or scale.shape[-1] == 1:
            return scale
        return scale.repeat_interleave(like.shape[-1] // scale.shape[-1], dim=-1)

    def bits_per_value(self, shape: tuple[int, int, int]) -> float:
        """Bits of one scale, shared out to the values; shape: KV heads, tokens, head dimension."""
        heads, tokens, width = shape
        size = (self.group or width, width, tokens, heads * tokens * width)[AXES.index(self.axis)]
        return self.dtype.itemsize * 8 / size


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of `dtype` that is not below `x` (>= 0); infinity and NaN stay."""
    if dtype != torch.float16:
        return x.to(dtype)
    half = x.half()
    return torch.where(half.float() < x, (half.view(torch.int16) + 1).view(torch.float16), half)


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` that is not above `x`."""
    size = round_up(x.abs(), dtype)
    smaller = x.abs().to(dtype)
    if dtype == torch.float16:
        over = smaller.float() > x.abs()
        smaller = torch.where(over, (smaller.view(torch.int16) - 1).view(torch.float16), smaller)
    return torch.where(x < 0, -size, smaller)


def within(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Decoded numbers in `dtype`: those that a rounded scale pushed beyond fp16's largest number become
    it."""
    if dtype != torch.float16:
        return x.to(dtype)
    return x.clamp(-65504, 65504).to(dtype)


def admit(name: str, x: Tensor, largest: float, nonfinite: str) -> tuple[Tensor, int]:
    """x and 0 where all values are finite and at most `largest`. Otherwise, by `nonfinite`: "refuse" raises a
    ValueError that names the first KV head (dimension 1 of x) that cannot be stored; "clip" returns x with
    infinity, NaN and values that are too large as `largest`, and their number. A single token on a GPU may be
    refused one token later (see `Late`)."""
    bad = ~(x.abs() <= largest)
    if nonfinite == "refuse" and later(bad, lambda: refuse(name, x, bad, largest)):
        return x, 0
    if not bad.any():
        return x, 0
    if nonfinite == "clip":
        return x.nan_to_num(nan=largest).clamp(-largest, largest), int(bad.sum())
    refuse(name, x, bad, largest)


def refuse(name: str, x: Tensor, bad: Tensor, largest: float) -> NoReturn:
    """The ValueError for the `bad` values of x."""
    head = int(bad.any(3).any(2).any(0).nonzero()[0])
    value = abs(x[:, head][bad[:, head]][0].item())
    what = f"a value above {largest:.6g} ({value:.6g})" if value < float("inf") else "NaN or infinity"
    raise ValueError(f"{name}: KV head {head} holds {what}")
