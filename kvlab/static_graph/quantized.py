"""Quantized buffers: one set of parameters for past and new, and what goes wrong without it (document 000).

The scales are fixed before the first token, per K or V and KV head. So a row is quantized once, when it is
made; concatenating it with the past and passing both to the next step changes no bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..cache import KVCache
from ..models import Anatomy, calibration_ids

QMAX = 127


@torch.no_grad()
def calibrate(model, parts: int = 1, ids: Tensor | None = None) -> list[Tensor]:
    """Scales `[KV heads / parts]` of every sequence, in the order of `graph.sequence_names`: the largest
    magnitude on a calibration text / 127. ids: `[1, tokens]` (default: `models.calibration_ids`)."""
    cache = KVCache(model)
    ids = calibration_ids(model) if ids is None else ids
    model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
    scales = []
    for layer in cache.layers:
        for held in layer.store.read(model.device):
            largest = held.float().abs().amax((0, 2, 3)).clamp(min=1e-6)  # [KV heads]
            scales += (largest / QMAX).chunk(parts)
    assert len(scales) == 2 * Anatomy(model).layers * parts
    return [scale.clone() for scale in scales]


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of `[..., heads, tokens, D]` with scales `[..., heads]`; what lies beyond is clipped."""
    return (x / scale[..., None, None]).round().clamp(-QMAX - 1, QMAX).to(torch.int8)


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Numbers again: codes `[..., heads, tokens, D]` times scales `[..., heads]`."""
    return codes.float() * scale[..., None, None]
