"""Scales: the largest magnitudes of K and V on a calibration text, before any prompt is seen."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ..attention import recorded
from ..models import calibration_ids, is_latent, prepare
from .profile import check_folder, write

KIND = "scales"


@torch.no_grad()
def largest(model, ids: Tensor | None = None, channels: bool = False) -> tuple[Tensor, Tensor]:
    """Of K and of V, `[layers, kv_heads, 1]`, or with `channels` of each channel, `[layers, kv_heads,
    head_dim]`. ids: `[1, tokens]` (default: `models.calibration_ids`)."""
    if is_latent(model):
        raise ValueError(f"{type(model).__name__} caches latents, which have no scales of K and V")
    layers = recorded(prepare(model), calibration_ids(model) if ids is None else ids)
    over = (0, 2) if channels else (0, 2, 3)

    def of(held: Tensor) -> Tensor:
        return held.float().abs().amax(over).clamp(min=1e-6).view(held.shape[1], -1)

    return torch.stack([of(x.keys) for x in layers]), torch.stack([of(x.values) for x in layers])


def write_scales(path: str | Path, model, ids: Tensor | None = None, channels: bool = False) -> None:
    """Write `largest` as a profile that `store.Calibrated` reads."""
    check_folder(path)
    keys, values = largest(model, ids, channels)
    write(path, KIND, model, {"keys": keys, "values": values}, channels=int(channels))
