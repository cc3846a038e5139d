"""Exact sinks: the first tokens of every row are held as they are, beside a coarse format."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer


class ExactSinks(Answer):
    """Hold the first tokens of every row in full precision.

    Attention rests on them at every step (Xiao et al. 2023), and their keys and values are the outliers of
    many models, so a coarse format loses most there. Their codes are stored too; what is read is overwritten.

    tokens: how many of each row's own tokens, at least 1.
    State: `held`, K and V `[batch, kv_heads, tokens, head_dim]`; `slots` `[batch, kv_heads, tokens]`, where
    they are in the store (-1: nowhere); `seen` `[batch]`, tokens seen.
    """

    def __init__(self, tokens: int = 4):
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"sinks={tokens!r}: expected a whole number of at least 0")
        self.tokens = tokens
        self.held: tuple[Tensor, ...] = ()
        self.slots: Tensor | None = None
        self.seen: Tensor | None = None

    def note(self, keys: Tensor, values: Tensor, real: Tensor | None, start: int) -> None:
        """New tokens `[batch, kv_heads, tokens, head_dim]` that go into the slots from `start` on."""
        batch, heads, count, width = keys.shape
        if not self.held:
            self.held = tuple(x.new_zeros(batch, heads, self.tokens, width) for x in (keys, values))
            self.slots = torch.full((batch, heads, self.tokens), -1, dtype=torch.int32, device=keys.device)
            self.seen = torch.zeros(batch, dtype=torch.int32, device=keys.device)
        if bool((self.seen >= self.tokens).all()):
            return
        if real is None:
            real = torch.ones(batch, count, dtype=torch.bool, device=keys.device)
        index = self.seen[:, None] + real.cumsum(1) - 1  # among the row's own tokens
        rows, columns = (real & (index < self.tokens)).nonzero(as_tuple=True)
        places = index[rows, columns]
        for held, new in zip(self.held, (keys, values), strict=True):
            held[rows, :, places] = new[rows, :, columns]
        self.slots[rows, :, places] = (start + columns).to(torch.int32)[:, None]
        self.seen = (self.seen + real.sum(1)).clamp(max=self.tokens).to(torch.int32)

    def restore(self, keys: Tensor, values: Tensor) -> None:
        """Overwrite them in what was read, `[batch, kv_heads, slots, head_dim]`, in place."""
        where = (self.slots.to(keys.device) >= 0).nonzero(as_tuple=True)
        slots = self.slots.to(keys.device)[where].long()
        for read, held in zip((keys, values), self.held, strict=True):
            read[where[0], where[1], slots] = held.to(read.device)[where]

    def keep_slots(self, slots: Tensor) -> None:
        there = slots.to(self.slots.device)[:, :, None, :] == self.slots[..., None]
        there &= (self.slots >= 0)[..., None]
        found = there.int().argmax(-1).to(torch.int32)
        self.slots = found.masked_fill(~there.any(-1), -1)

    def crop(self, length: int) -> None:
        self.slots = self.slots.masked_fill(self.slots >= length, -1)
        self.seen = (self.slots[:, 0] >= 0).sum(-1).to(torch.int32)  # nothing has been evicted
