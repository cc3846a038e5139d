"""Smoothed: scale K's outlier channels down before it is quantized (Xiao et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibrate.smoothing import check_strength, factors
from ..parameters import check_kind
from .exact import Exact, Parts
from .int import Scales, within


@dataclass(frozen=True)
class Smoothed(Exact):
    """Divide every channel of K by its own size, quantize, and multiply back when reading.

    q k = (q s)(k / s) for any s per channel, so nothing is lost, and the largest of the neighbouring channels
    no longer sets their shared scale (SmoothQuant, Xiao et al. 2023). Multiplying the keys read is the same
    as multiplying q, and is needed if a rotary embedding comes between W_k and the cache. If none does,
    `fold_smoothing` moves s into the weights. The first tokens stored decide, row by row.

    format: the format of K / s. strength: 0 (nothing) to 1 (all channels alike). Parts: the format's, and s,
    `[batch, kv_heads, 1, head_dim]`.
    """

    format: Exact
    strength: float = 0.5

    def __post_init__(self):
        check_kind("format", self.format, Exact, "a format")
        check_strength(self.strength)

    @property
    def over_heads(self) -> bool:
        return self.format.over_heads

    @property
    def fixed_parts(self) -> int:
        return self.format.fixed_parts + 1

    def check(self, head_dim: int) -> None:
        self.format.check(head_dim)

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        return self.format.beyond(x / fixed[-1], fixed[:-1])

    def cut(self, x: Tensor, fixed: Parts) -> int:
        return self.format.admit(x / fixed[-1])[1]

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        *inner, factor = fixed or (None,)
        if factor is None:
            size = Scales("channel").reduce(x.float().abs().nan_to_num(posinf=0.0), True, real)
            factor = factors(size, self.strength)
        return *self.format.encode(x / factor, real, tuple(inner)), factor

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        wide = torch.float32 if dtype == torch.float16 else dtype  # a factor may be beyond fp16
        return within(self.format.decode(parts[:-1], wide) * parts[-1].to(parts[0].device, wide), dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return self.format.bits_per_value(shape, dtype) + 32 / shape[1]
