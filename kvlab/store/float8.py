"""8-bit floating point, with and without a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import Exact
from .scale import NONFINITE, Scales, clip, refuse, round_up


class Float8(Exact):
    """8-bit floating point: e4m3 (3 bits of fraction, up to 448) or e5m2 (fp16 cut in half).

    Source: document 004. Without a scale, values beyond the format's range become its largest value. With
    one, the largest value of what shares the scale becomes the format's largest.

    format: "e4m3" or "e5m2". axis: what shares a scale (None: there is none), group, scale (its dtype): see
    `Scales`. nonfinite: "refuse" NaN and infinity (ValueError naming the head), or "clip" them to the largest
    value and count them in `replaced`.
    """

    TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

    def __init__(
        self,
        format: str = "e4m3",
        axis: str | None = None,
        group: int | None = None,
        scale: str = "fp16",
        nonfinite: str = "refuse",
    ):
        if format not in self.TYPES:
            raise ValueError(f"format={format!r}: expected one of {', '.join(self.TYPES)}")
        if nonfinite not in NONFINITE:
            raise ValueError(f"nonfinite={nonfinite!r}: expected one of {', '.join(NONFINITE)}")
        if axis is None and group is not None:
            axis = "group"
        self.format, self.nonfinite = format, nonfinite
        self.scales = None if axis is None else Scales(axis, group, scale)
        self.replaced = 0  # values stored as the largest one because they were not finite
        self.fixed: Tensor | None = None  # the scale where the first tokens decide

    @property
    def largest(self) -> float:
        return torch.finfo(self.TYPES[self.format]).max

    @property
    def plain(self) -> bool:
        """Whether the bits are all there is."""
        return self.scales is None

    def bind(self, head_dim: int) -> None:
        if self.scales is not None:
            self.scales.check(head_dim)

    def encode(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        limit = torch.finfo(x.dtype).max
        if self.scales is not None and self.scales.dtype == torch.float16:
            limit = min(limit, 65504 * self.largest)
        if self.nonfinite == "refuse":
            refuse(f"fp8 {self.format}", x, limit)
        else:
            x, count = clip(x, limit)
            self.replaced += count
        if self.scales is None:
            return (self._bits(x),)
        x, scale = x.float(), self.fixed
        if scale is None:
            scale = round_up(self.scales.reduce(x.abs(), True, real) / self.largest, self.scales.dtype)
        if self.scales.fixed:
            self.fixed = scale
        bits = self._bits(x / self.scales.spread(scale.float().clamp(min=self.scales.smallest), x))
        return (bits,) if self.scales.fixed else (bits, scale)

    def _bits(self, x: Tensor) -> Tensor:
        return x.clamp(-self.largest, self.largest).to(self.TYPES[self.format]).view(torch.uint8)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        numbers = self._numbers(parts[0], dtype)
        if self.scales is None:
            return numbers
        scale = (self.fixed if self.scales.fixed else parts[1]).to(numbers.device, dtype)
        return numbers * self.scales.spread(scale, numbers)

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
