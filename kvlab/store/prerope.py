"""PreRope: hold keys as they were before RoPE, when channels keep their places (Hooper et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.rope import rotations_of
from .growing import Growing, GrowingState, joined


class PreRope(Growing):
    """Undo the rotary embedding of keys before they are written, and rotate what is read.

    A key's outliers are channels, the same ones at all tokens, until RoPE mixes each with another one by an
    angle that hangs on the position; so a format with a scale per channel fits keys better before it (Hooper
    et al. 2024, arXiv 2401.18079, section 3.2). Positions are stored, and keys rotated again at every step.

    format: of K before RoPE. values, sinks: as in `Growing`. ValueError for a model that does not rotate its
    keys, or in a way that cannot be undone, and for a host, which sends keys as they are stored.
    """

    def start(self, layer) -> PreRopeState:
        super().start(layer)
        return PreRopeState(self, rotations_of(layer.model)[layer.order])

    def suits(self, keep, place) -> None:
        if place.on_host:
            raise ValueError("keys are held before RoPE, and a host sends them as they are stored")

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        heads, tokens, width = shape
        return super().bits_per_value(shape, dtype) + 32 * (1 + 1 / tokens) / (2 * heads * width)


class PreRopeState(GrowingState):
    """at: positions of the slots, int32 `[batch, 1 or kv_heads, slots]`; seen `[batch]`: tokens of rows."""

    per_slot = (*GrowingState.per_slot, "at")
    per_row = (*GrowingState.per_row, "seen")
    shared = ("rotation",)
    kernel_ready = False

    def __init__(self, policy: Growing, rotation):
        super().__init__(policy)
        self.rotation = rotation  # None: this layer rotates nothing

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        batch, _, tokens, _ = keys.shape
        real = keys.new_ones(batch, tokens, dtype=torch.bool) if real is None else real.to(keys.device)
        self.seen = keys.new_zeros(batch, dtype=torch.int32) if self.seen is None else self.seen
        at = (self.seen[:, None] + real.cumsum(1) - 1).clamp(min=0).to(torch.int32)
        plain = keys
        if self.rotation is not None:
            exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
            plain = self.rotation.undo(exact, at[:, None].expand(keys.shape[:3])).to(keys.dtype)
        super().append(plain, values, real)
        heads = 1 if self.at is None else self.at[0].shape[1]
        self.at = joined(self.at, (at[:, None].expand(-1, heads, -1),))
        self.seen = self.seen + real.sum(1).to(torch.int32)

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        keys, values = super().read(device)
        if self.rotation is not None:
            at = self.at[0].to(device).expand(keys.shape[:3])
            plain = keys.to(torch.promote_types(keys.dtype, torch.float32))
            turned = self.rotation.move(plain, torch.zeros_like(at), at) * self.rotation.scale
            keys = turned.to(keys.dtype)
        return keys, values

    def keep_slots(self, slots: Tensor) -> None:  # by hand: heads that keep the same tokens share positions
        alike = self.at[0].shape[1] == 1 and torch.equal(slots, slots[:, :1].expand_as(slots))
        super().keep_slots(slots)
        if alike:
            self.at = (self.at[0][:, :1].clone(),)

    def crop(self, length: int) -> None:  # by hand: the next token comes after the last that stays
        super().crop(length)
        self.seen = self.at[0][:, 0].amax(1) + 1 if length else torch.zeros_like(self.seen)
