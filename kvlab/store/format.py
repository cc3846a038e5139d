"""Formats: how one token's K or V vector is written down. Exact, and packed integers."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer
from .scale import NONFINITE, Scales, clip, refuse, round_down, round_up


class Exact(Answer):
    """The numbers as the model made them.

    A format turns `[batch, kv_heads, tokens, head_dim]` into a tuple of tensors
    `[batch, kv_heads, tokens, width]` and back. Every token is written by itself, so a padded batch and a
    single row store the same bits, and nothing that is stored is ever written again. A store has one format
    for K and one for V; what a format holds besides follows the rows (see `Answer`).
    """

    def bind(self, head_dim: int) -> None:
        """Check the parameters against the model's head dimension (ValueError)."""

    def encode(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        """real: bool `[batch, tokens]`, which tokens are no padding (default: all)."""
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0] if parts[0].dtype == dtype else parts[0].to(dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        """True bits for each number of one row's K or V, scales and all; shape: KV heads, tokens, head
        dimension; dtype: the model's."""
        return dtype.itemsize * 8


class Int(Exact):
    """Integers with shared scales: int8, int4 (two values per byte), int2 (four).

    Symmetric: x ~ code * scale, scale = absmax / qmax with qmax = 127, 7 or 1; zero stays zero. Asymmetric:
    x ~ code * scale + zero, from the smallest value to the largest; `zero` is the value of code 0. The scale
    is rounded *up* (and `zero` down), so that the error is at most half a step. Source: document 004.

    bits: 2, 4 or 8 bits per value. group, axis, scale (its dtype): what shares a scale, see `Scales`.
    symmetric: False stores a zero point beside each scale. nonfinite: "refuse" NaN, infinity and what is too
    large for the scale's dtype (ValueError naming the head), or "clip" them to the largest value and count
    them in `replaced`. By default the cost is bits + 16 / head_dim bits per value.
    """

    def __init__(
        self,
        bits: int = 8,
        group: int | None = None,
        axis: str = "group",
        symmetric: bool = True,
        scale: str = "fp16",
        nonfinite: str = "refuse",
    ):
        if bits not in (2, 4, 8) or isinstance(bits, bool):
            raise ValueError(f"bits={bits!r}: expected 2, 4 or 8")
        if not isinstance(symmetric, bool):
            raise ValueError(f"symmetric={symmetric!r}: expected true or false")
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={nonfinite!r}: expected one of {', '.join(NONFINITE)}")
        self.scales = Scales(axis, group, scale)
        self.bits, self.symmetric, self.nonfinite = bits, symmetric, nonfinite
        self.qmax = 2 ** (bits - 1) - 1
        self.replaced = 0  # values stored as the largest one
        self.fixed: tuple[Tensor, ...] = ()  # scale and zero point where the first tokens decide

    @property
    def group(self) -> int | None:
        """Channels that share a scale."""
        return self.scales.group

    @property
    def plain(self) -> bool:
        """Whether this is what kernels read: codes, and one fp16 scale per token and group."""
        return self.symmetric and not self.scales.fixed and self.scales.dtype == torch.float16

    def bind(self, head_dim: int) -> None:
        self.scales.check(head_dim)
        if head_dim % (8 // self.bits):
            raise ValueError(f"bits={self.bits}: head dimension {head_dim} does not fill whole bytes")

    def encode(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        x = self.allowed(x.float())
        numbers = self.fixed or self.fit(x, real)
        if self.scales.fixed:
            self.fixed = numbers
        return pack(self.quantize(x, numbers), self.bits), *(() if self.scales.fixed else numbers)

    def fit(self, x: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
        """(scale,) or (scale, zero) of every group of x, shaped as in `Scales.reduce`."""
        dtype = self.scales.dtype
        if self.symmetric:
            return (round_up(self.scales.reduce(x.abs(), True, real) / self.qmax, dtype),)
        zero = round_down(self.scales.reduce(x, False, real), dtype)
        span = self.scales.reduce(x, True, real) - zero.float()
        return round_up(span / (2**self.bits - 1), dtype), zero

    def quantize(self, x: Tensor, numbers: tuple[Tensor, ...]) -> Tensor:
        """int8 codes of x, fp32, not packed."""
        step = self.scales.spread(numbers[0].float().clamp(min=self.scales.smallest), x)
        if self.symmetric:
            codes = torch.round(x / step)
            codes = codes.clamp_(-self.qmax, self.qmax) if self.scales.fixed else codes
        else:
            codes = torch.round((x - self.scales.spread(numbers[1].float(), x)) / step)
            codes = codes.clamp_(0, 2**self.bits - 1) - 2 ** (self.bits - 1)
        return codes.to(torch.int8)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes = unpack(parts[0], self.bits).to(dtype)
        numbers = [n.to(codes.device, dtype) for n in (self.fixed if self.scales.fixed else parts[1:])]
        if self.scales.fixed:
            return self.dequantize(codes, numbers)
        codes = codes.unflatten(-1, (numbers[0].shape[-1], -1))  # [batch, kv_heads, tokens, groups, group]
        return self.dequantize(codes, [n.unsqueeze(-1) for n in numbers]).flatten(-2)

    def dequantize(self, codes: Tensor, numbers) -> Tensor:
        """Numbers again, in place; codes not packed, in the dtype wanted."""
        if self.symmetric:
            return codes.mul_(numbers[0])
        return codes.add_(2 ** (self.bits - 1)).mul_(numbers[0]).add_(numbers[1])

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return self.bits + (1 if self.symmetric else 2) * self.scales.bits_per_value(shape)

    def allowed(self, x: Tensor) -> Tensor:
        """x without values that cannot be stored, or a ValueError."""
        limit = torch.finfo(self.scales.dtype).max
        if self.scales.dtype == torch.float16:
            limit *= self.qmax if self.symmetric else 1
        else:
            limit /= 1 if self.symmetric else 2  # so that the span is finite
        if self.nonfinite == "refuse":
            refuse(f"int{self.bits}", x, limit)
            return x
        x, count = clip(x, limit)
        self.replaced += count
        return x


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes -> bytes: the last dimension is cut into 8 / bits equal parts that share each byte."""
    if bits == 8:
        return codes
    unsigned = (codes + 2 ** (bits - 1)).to(torch.uint8)
    packed = None
    for place, part in enumerate(unsigned.chunk(8 // bits, dim=-1)):
        packed = part if packed is None else packed | (part << (bits * place))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int8 codes."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    parts = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    return torch.cat(parts, dim=-1).to(torch.int8) - 2 ** (bits - 1)
