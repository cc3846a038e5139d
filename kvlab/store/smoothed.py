"""Smoothing: take the size of K's outlier channels out before it is quantized (document 004)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibrate.smoothing import check_strength, factors
from .format import Exact
from .scale import Scales


class Smoothed(Exact):
    """Divide every channel of K by its own size, quantize, and multiply back what is read.

    q k = (q s)(k / s) for any s per channel, so nothing is lost, and a scale that neighbouring channels share
    no longer follows the largest of them (SmoothQuant, Xiao et al. 2023). Multiplying what is read is the
    same as multiplying q, and the way to do it where a rotary embedding stands between W_k and the cache.
    Where none does, `fold_smoothing` moves s into the weights. The first tokens stored decide, row by row.

    format: what K / s is stored in. strength: 0 (nothing) to 1 (all channels alike).
    """

    def __init__(self, format: Exact, strength: float = 0.5):
        self.format, self.strength = format, check_strength(strength)
        self.factor: Tensor | None = None  # s, [batch, kv_heads, 1, head_dim]

    def bind(self, head_dim: int) -> None:
        self.format.bind(head_dim)

    def encode(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, ...]:
        if self.factor is None:
            size = Scales("channel").reduce(x.float().abs().nan_to_num(posinf=0.0), True, real)
            self.factor = factors(size, self.strength)
        return self.format.encode(x / self.factor, real)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return self.format.decode(parts, dtype) * self.factor.to(parts[0].device, dtype)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.format.select_rows(rows)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return self.format.bits_per_value(shape, dtype) + 32 / shape[1]
