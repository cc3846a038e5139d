"""Float8: 8-bit floating point, with and without a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..parameters import check_one_of
from .exact import Exact, Parts
from .int import DTYPES, NONFINITE, Scales, admit, round_up, within


@dataclass(frozen=True)
class Float8(Exact):
    """8-bit floating point: e4m3 (3 bits of fraction, up to 448) or e5m2 (fp16 cut in half).

    Source: Micikevicius et al. 2022, arXiv 2209.05433. With a scale, the largest value that shares it is
    mapped to the format's largest.

    format: "e4m3" or "e5m2". axis: what shares a scale: "group", "token", "channel" or "tensor"; None: there
    is no scale. group, scale (its dtype): see `Scales`. nonfinite: "refuse" NaN, infinity and, without a
    scale, values beyond the format's largest (ValueError naming the head), or "clip" them to it. Small values
    are rounded: without a scale, e4m3 reads 0 below 2**-10 and e5m2 below 2**-17, which is not counted.
    Parts: bits and, with an axis, scale.
    """

    format: str = "e4m3"
    axis: str | None = None
    group: int | None = None
    scale: str = "fp16"
    nonfinite: str = "refuse"

    TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

    def __post_init__(self):
        check_one_of("format", self.format, self.TYPES)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        check_one_of("scale", self.scale, DTYPES)
        axis = "group" if self.axis is None and self.group is not None else self.axis
        if axis is None and self.scale != "fp16":
            raise ValueError(f"scale={self.scale!r}: there is none without axis= or group=")
        object.__setattr__(self, "scales", None if axis is None else Scales(axis, self.group, self.scale))

    @property
    def largest(self) -> float:
        return torch.finfo(self.TYPES[self.format]).max

    @property
    def over_heads(self) -> bool:
        return self.scales is not None and self.scales.axis == "tensor"

    @property
    def fixed_parts(self) -> int:
        return int(self.scales is not None and self.scales.fixed)

    def check(self, head_dim: int) -> None:
        if self.scales is not None:
            self.scales.check(head_dim)

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        if self.scales is None:
            return admit(f"fp8 {self.format} without a scale (axis=)", x, self.largest, self.nonfinite)
        most = torch.finfo(torch.float32).max / 2  # what is read may be a step more
        if self.scales.dtype == torch.float16:
            most = 65504 * self.largest
        limit = min(torch.finfo(x.dtype).max, most)
        return admit(f"fp8 {self.format}", x, limit, self.nonfinite)

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        if not self.fixed_parts:
            return None
        return x.float().abs() > self.largest * fixed[0].float().clamp(min=self.scales.smallest)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        if self.scales is None:
            return (self._bits(x),)
        x = x.float()
        scale = fixed[0] if fixed else self._fit(x, real)
        step = scale.float().clamp(min=self.scales.smallest)
        return self._bits(x / self.scales.spread(step, x)), scale

    def _fit(self, x: Tensor, real: Tensor | None) -> Tensor:
        return round_up(self.scales.reduce(x.abs(), True, real) / self.largest, self.scales.dtype)

    def _bits(self, x: Tensor) -> Tensor:
        return x.clamp(-self.largest, self.largest).to(self.TYPES[self.format]).view(torch.uint8)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        if self.scales is None:
            return self._numbers(parts[0], dtype)
        wide = dtype if dtype != torch.float16 else self.scales.dtype  # a scale may be none that fp16 holds
        numbers = self._numbers(parts[0], wide)
        scale = self.scales.spread(parts[1].to(numbers.device, wide), numbers)
        return within(numbers * scale, dtype)

    def _numbers(self, bits: Tensor, dtype: torch.dtype) -> Tensor:
        if bits.is_cuda:
            return bits.view(self.TYPES[self.format]).to(dtype)
        # On the CPU the bits are moved to where fp16 has them, which is faster than torch's conversion.
        bits = bits.to(torch.int16)
        if self.format == "e5m2":
            return (bits << 8).view(torch.float16).to(dtype)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # exponent bias 7 read as fp16's 15: 2^-8
        return bits.view(torch.float16).to(dtype) * 256

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return 8 + (0 if self.scales is None else self.scales.bits_per_value(shape))
