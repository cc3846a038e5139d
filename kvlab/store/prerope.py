"""PreRope: store keys before RoPE, when outlier channels are the same at all positions (Hooper et al.
2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.rope import rotation_of
from ..policy import State
from .growing import Growing, GrowingState
from .int import within


class PreRope(Growing):
    """Undo the rotary embedding of keys before they are written, and rotate them when they are read.

    Keys have the same outlier channels at all tokens, until RoPE mixes each with another by an angle that
    depends on the position; so a format with a scale per channel fits keys better before RoPE (Hooper et al.
    2024, arXiv 2401.18079, section 3.2). Positions are stored, and keys are rotated again at every step.

    format: of K before RoPE. values, sinks: as in `Growing`. ValueError for a model that does not rotate its
    keys, or in a way that cannot be undone, and for a host, which transfers keys in their stored form.
    """

    def start(self, layer) -> PreRopeState:
        super().start(layer)
        return PreRopeState(self, rotation_of(layer))

    def suits(self, keep, place) -> None:
        if place.on_host:
            raise ValueError("keys are held before RoPE, and a host sends them as they are stored")

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        heads, tokens, width = shape
        return super().bits_per_value(shape, dtype) + 32 * (1 + 1 / tokens) / (2 * heads * width)


class PreRopeState(GrowingState):
    """places: positions of the slots. rotation: how the layer rotates (`Rotation`); None: not at all."""

    states = (*GrowingState.states, "places")
    shared = (*GrowingState.shared, "rotation")

    def __init__(self, policy: Growing, rotation):
        super().__init__(policy)
        self.places, self.rotation = Places(policy), rotation

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        at = self.places.note(keys, real)
        if self.rotation is not None:
            exact = keys.to(torch.promote_types(keys.dtype, torch.float32))
            keys = self.rotation.undo(exact, at).to(keys.dtype)
        super().append(keys, values, real)

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        keys, values = super().read(device)
        if self.rotation is not None:
            plain = keys.to(torch.promote_types(keys.dtype, torch.float32))
            turned = self.rotation.turn(plain, *self.rotation.angles(self.places.at.to(device)))
            keys = within(turned * self.rotation.scale, keys.dtype)
        return keys, values


class Places(State):
    """at: positions of the slots, int32 `[batch, 1 or kv_heads, slots]`; seen `[batch]`: tokens of a row."""

    per_slot = ("at",)
    per_row = ("seen",)

    def note(self, keys: Tensor, real: Tensor | None) -> Tensor:
        """Store and return the positions `[batch, 1, tokens]` of new keys; real: see `append`."""
        batch, _, tokens, _ = keys.shape
        real = keys.new_ones(batch, tokens, dtype=torch.bool) if real is None else real.to(keys.device)
        seen = keys.new_zeros(batch, dtype=torch.int32) if self.seen is None else self.seen
        new = (seen[:, None] + real.cumsum(1) - 1).clamp(min=0).to(torch.int32)[:, None]
        self.seen = seen + real.sum(1).to(torch.int32)
        self.at = new if self.at is None else torch.cat([self.at, new.expand(-1, self.at.shape[1], -1)], 2)
        return new

    def keep_slots(self, slots: Tensor) -> None:  # by hand: heads that keep the same tokens share positions
        alike = self.at.shape[1] == 1 and torch.equal(slots, slots[:, :1].expand_as(slots))
        super().keep_slots(slots)
        self.at = self.at[:, :1].clone() if alike else self.at

    def crop(self, length: int) -> None:  # by hand: the next token comes after the last that stays
        super().crop(length)
        self.seen = self.at[:, 0].amax(1) + 1 if length else torch.zeros_like(self.seen)
