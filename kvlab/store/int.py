"""Int: packed integers with shared scales, int8, int4 (two values per byte) and int2 (four)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .exact import Exact, Parts
from .scales import NONFINITE, Scales, admit, round_down, round_up


@dataclass(frozen=True)
class Int(Exact):
    """Integers with shared scales: int8, int4 (two values per byte), int2 (four).

    Symmetric: x ~ code * scale, scale = absmax / qmax with qmax = 127, 7 or 1; zero stays zero. Asymmetric:
    x ~ code * scale + zero, from the smallest value to the largest; `zero` is the value of code 0. The scale
    is rounded *up* (and `zero` down), so that the error is at most half a step.

    bits: 2, 4 or 8 bits per value. group, axis, scale (its dtype): what shares a scale, see `Scales`.
    symmetric: False stores a zero point beside each scale. nonfinite: "refuse" NaN, infinity and what is too
    large for the scale's dtype (ValueError naming the head), or "clip" them to the largest value. By default
    the cost is bits + 16 / head_dim bits per value. Parts: codes, scale and, if asymmetric, zero point.
    Another width needs another way to `pack` and `unpack`, which Kivi and the kernels read too: a class of
    its own is less (`store/float8.py` is a whole one).
    """

    bits: int = 8
    group: int | None = None
    axis: str = "group"
    symmetric: bool = True
    scale: str = "fp16"
    nonfinite: str = "refuse"

    def __post_init__(self):
        if self.bits not in (2, 4, 8) or isinstance(self.bits, bool):
            raise ValueError(f"bits={self.bits!r}: expected 2, 4 or 8")
        if not isinstance(self.symmetric, bool):
            raise ValueError(f"symmetric={self.symmetric!r}: expected true or false")
        if self.nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={self.nonfinite!r}: expected one of {', '.join(NONFINITE)}")
        object.__setattr__(self, "scales", Scales(self.axis, self.group, self.scale))

    @property
    def qmax(self) -> int:
        return 2 ** (self.bits - 1) - 1

    @property
    def kernel_ready(self) -> bool:
        return self.symmetric and not self.scales.fixed and self.scales.dtype == torch.float16

    @property
    def fixed_parts(self) -> int:
        return self.scales.fixed * (1 if self.symmetric else 2)

    def check(self, head_dim: int) -> None:
        self.scales.check(head_dim)
        if head_dim % (8 // self.bits):
            raise ValueError(f"bits={self.bits}: head dimension {head_dim} does not fill whole bytes")

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        largest = torch.finfo(self.scales.dtype).max
        if self.scales.dtype == torch.float16:
            largest *= self.qmax if self.symmetric else 1
        else:
            largest /= 1 if self.symmetric else 2  # so that the span is finite
        return admit(f"int{self.bits}", x.float(), largest, self.nonfinite)

    def write(
        self, x: Tensor, real: Tensor | None = None, fixed: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, ...]:
        numbers = fixed or self.fit(x, real)  # the scale of every group: its largest value / qmax
        codes = self.quantize(x, numbers)  # value / scale, rounded
        return pack(codes, self.bits), *numbers

    def fit(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
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

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes = unpack(parts[0], self.bits).to(dtype)
        numbers = [n.to(codes.device, dtype) for n in parts[1:]]
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


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes -> bytes: the last dimension is cut into 8 / bits equal parts that share each byte.
    ValueError for a width that does not divide 8."""
    _check_width(bits)
    if bits == 8:
        return codes
    unsigned = (codes + 2 ** (bits - 1)).to(torch.uint8)
    packed = None
    for place, part in enumerate(unsigned.chunk(8 // bits, dim=-1)):
        packed = part if packed is None else packed | (part << (bits * place))
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`: int8 codes."""
    _check_width(bits)
    if bits == 8:
        return packed
    mask = 2**bits - 1
    parts = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    return torch.cat(parts, dim=-1).to(torch.int8) - 2 ** (bits - 1)


def _check_width(bits: int) -> None:
    if bits < 1 or 8 % bits:
        raise ValueError(f"bits={bits}: does not divide 8, so whole codes would not fill a byte")
