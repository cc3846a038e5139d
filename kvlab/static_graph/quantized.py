"""Quantized buffers: one set of parameters for past and new.

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
