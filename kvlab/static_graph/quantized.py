"""Quantized buffers: one set of parameters for past and new, and what goes wrong without it.

The scales are fixed before the first token, per K or V and KV head. So a row is quantized once, when it is
made; concatenating it with the past and passing both to the next step changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..calibrate.scales import largest

QMAX = 127


def calibrate(model, parts: int = 1, ids: Tensor | None = None) -> list[Tensor]:
    """Scales `[KV heads / parts]` of every sequence, in the order of `graph.sequence_names`: the largest
    magnitude on a calibration text / 127. ids: `[1, tokens]` (default: `models.calibration_ids`)."""
    pairs = zip(*largest(model, ids), strict=True)
    return [scale.clone() for pair in pairs for kind in pair for scale in (kind[:, 0] / QMAX).chunk(parts)]


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of `[..., heads, tokens, D]` with scales `[..., heads]`; larger numbers are clipped."""
    return (x / scale[..., None, None]).round().clamp(-QMAX - 1, QMAX).to(torch.int8)


def half(x: Tensor) -> Tensor:
    """x in fp16; larger numbers are clipped."""
    return x.clamp(-65504, 65504).half()


def drift(rows: Tensor, scale: Tensor, window: int | None = None) -> tuple[list[float], list[float]]:
    """Error of the rows held after every step, relative to their size: (fixed scale, requantized).

    rows `[heads, tokens, D]` arrive one by one; scale `[heads]` is the calibrated one; window: most rows held
    (default: all). Fixed: each row is quantized once. Requantized: at each step the past is turned into
    numbers, the new row joins, a new scale is taken from their largest magnitude, and all are quantized
    again. The errors are root mean squares over everything held, divided by that of the exact rows.
    """
    window = rows.shape[1] if window is None else window
    once, again, now = quantize(rows, scale), None, None
    fixed, requantized = [], []
    for end in range(1, rows.shape[1] + 1):
        first = max(0, end - window)
        exact, new = rows[:, first:end], rows[:, end - 1 : end]
        held = new if again is None else torch.cat([dequantize(again, now)[:, 1 - window or None :], new], 1)
        if window == 1:
            held = new
        now = held.abs().amax((1, 2)).clamp(min=1e-6) / QMAX
        again = quantize(held, now)
        size = exact.square().mean().sqrt()
        fixed.append(float((dequantize(once[:, first:end], scale) - exact).square().mean().sqrt() / size))
        requantized.append(float((dequantize(again, now) - exact).square().mean().sqrt() / size))
    return fixed, requantized


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Numbers again: codes `[..., heads, tokens, D]` times scales `[..., heads]`."""
    return codes.to(scale.dtype) * scale[..., None, None]
