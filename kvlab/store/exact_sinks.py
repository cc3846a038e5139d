"""Exact sinks: the first tokens of every row are held as they are, beside a coarse format."""

from __future__ import annotations

import torch
from torch import Tensor

from ..policy import State


class ExactSinks(State):
    """Hold the first tokens of every row in full precision: part of a store's state.

    They receive attention at every step (Xiao et al. 2023), and in many models their keys and values are
    outliers, so a coarse format loses most there. Their codes are stored too, and overwritten when they are
    read.

    tokens: the number of each row's own tokens. held: K and V `[batch, kv_heads, tokens, head_dim]`; where
    `[batch, kv_heads, tokens]`: the slots of the store that they are in (-1: nowhere); seen `[batch]`: tokens
    seen, up to `tokens`.
    """

    per_row = ("held", "where", "seen")

    def __init__(self, policy, tokens: int):
        super().__init__(policy)
        self.tokens = tokens

    def note(self, keys: Tensor, values: Tensor, real: Tensor | None, start: int) -> None:
        """New tokens `[batch, kv_heads, tokens, head_dim]` that go into the slots from `start` on."""
        batch, heads, count, _ = keys.shape
        most = self.tokens
        if self.held is None:
            self.held = tuple(x.new_zeros(batch, heads, most, x.shape[3]) for x in (keys, values))
            self.where = torch.full((batch, heads, most), -1, dtype=torch.int32, device=keys.device)
            self.seen = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        if bool((self.seen >= most).all()):
            return
        if real is None:
            real = torch.ones(batch, count, dtype=torch.bool, device=keys.device)
        index = self.seen[:, None] + real.cumsum(1) - 1  # among the row's own tokens
        rows, columns = (real & (index < most)).nonzero(as_tuple=True)
        places = index[rows, columns]
        # not in place: a cache may be filled in torch's inference mode, and used after it
        self.held, self.where = tuple(held.clone() for held in self.held), self.where.clone()
        for held, new in zip(self.held, (keys, values), strict=True):
            held[rows, :, places] = new[rows, :, columns]
        self.where[rows, :, places] = (start + columns).to(torch.int32)[:, None]
        self.seen = (self.seen + real.sum(1)).clamp(max=most).to(torch.int32)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Overwrite them in the numbers read, `[batch, kv_heads, slots, head_dim]`, in place."""
        held_at = self.where.to(keys.device)
        there = (held_at >= 0).nonzero(as_tuple=True)
        slots = held_at[there].long()
        for read, held in zip((keys, values), self.held, strict=True):
            read[there[0], there[1], slots] = held.to(read)[there]

    def keep_slots(self, slots: Tensor) -> None:  # by hand: `where` names slots, which get other numbers
        there = slots.to(self.where.device)[:, :, None, :] == self.where[..., None]
        there &= (self.where >= 0)[..., None]
        found = there.int().argmax(-1).to(torch.int32)
        self.where = found.masked_fill(~there.any(-1), -1)

    def crop(self, length: int) -> None:  # by hand, as above
        self.where = self.where.masked_fill(self.where >= length, -1)
        self.seen = (self.where[:, 0] >= 0).sum(-1).to(torch.int32)  # nothing has been evicted
