"""Calibrated: integers whose scales were found beforehand, on another text (post-training quantization)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..calibrate.profile import read
from ..calibrate.scales import KIND
from ..devices import entry_of
from ..parameters import check_kind
from .exact import Parts
from .growing import Growing, GrowingState
from .int import Int, round_up


@dataclass(frozen=True, eq=False)
class Given(Int):
    """Symmetric integers with scales that are independent of the prompt. most: the value of the largest
    code, `[kv_heads, 1 or head_dim]`; larger values are clipped and counted."""

    axis: str = "channel"
    most: Tensor | None = None

    def given(self, rows: int) -> Parts:
        step = round_up(self.most / self.qmax, self.scales.dtype)
        return (step[:, None].repeat(rows, 1, 1, 1),)

    def fit(self, x: Tensor, real: Tensor | None = None) -> Parts:
        return self.given(len(x))

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return self.bits + 16 * self.most.shape[1] / (shape[1] * shape[2])


class Calibrated(Growing):
    """Integers with scales from a file (*8-bit KV Cache* 2024: found by post-training quantization and passed
    to the kernel), while `Int` finds its scales at run time, per token or from the prompt.

    profile: a file written by `calibrate.scales.write_scales`: a number for each KV head of a layer, or for
    each of its channels. bits: 2 to 8. ValueError for a file of another model.
    """

    def __init__(self, profile: str | Path, bits: int = 8):
        check_kind("profile", profile, str | Path, "a file that kvlab.calibrate.scales.write_scales wrote")
        super().__init__(Int(bits, axis="channel"))
        self.profile = read(profile, KIND, keys=3, values=3)
        most = self.format.qmax * torch.finfo(self.format.scales.dtype).max
        for name, numbers in self.profile.arrays.items():
            if not ((numbers > 0) & (numbers <= most)).all():
                raise ValueError(
                    f"profile={profile}: {name}: expected largest magnitudes, all above 0, at most {most:g}"
                )

    def start(self, layer) -> GrowingState:
        shape, channels = layer.shape, self.profile.about.get("channels")
        size = shape.layers, shape.kv_heads
        sizes = {"keys": (*size, shape.head_dim), "values": (*size, shape.value_dim)}
        wanted = sizes if channels else {name: (*size, 1) for name in sizes}
        if layer.order == 0:
            self.profile.check(layer.model, **wanted)
        mine = slice(layer.rank * layer.kv_heads, (layer.rank + 1) * layer.kv_heads)
        arrays, device = self.profile.arrays, entry_of(layer.model)
        given = (torch.from_numpy(arrays[name][layer.order, mine]).to(device) for name in sizes)
        return Growing(*(Given(self.format.bits, most=one) for one in given)).start(layer)
