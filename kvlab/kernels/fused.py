"""Fused: a decode step's append and its attention in one call of a compiled kernel, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from .attend import ALL, arrays, fits, kept_as, kernel_for, run


class Fused:
    """The step of a layer in which nothing else happens: its K and V lie on the CPU in one buffer, every slot
    holds a token that every query sees, and the keep neither watches nor chooses.

    Made when such a layer has come through a pass, and good as long as its buffers are these and have a free
    slot: what else a step could ask has been asked. heads: query heads.
    """

    def __init__(self, store, heads: int, head_dim: int):
        batch, kv_heads = store.keys[0].shape[:2]
        self.asked = (batch, heads, 1, head_dim)  # shapes of the query, and of K and V
        self.new = (batch, kv_heads, 1, head_dim)
        self.dtype = kept_as(store) or torch.float32
        self.kernel = kernel_for(store, self.asked)
        self.buffers, self.held = store.keys, (*arrays(store.keys), *arrays(store.values))

    @classmethod
    def of(cls, store, query: Tensor) -> Fused | None:
        """For a store and queries like this one; None where no kernel fits, or writes into its buffers."""
        turned = store.format.coded is not store.format or store.value_format.coded is not store.value_format
        if turned or not store.in_place or query.device.type != "cpu":
            return None
        one = query[:, :, -1:].detach()
        return cls(store, query.shape[1], query.shape[3]) if fits(store, one) else None

    def call(self, store, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor | None:
        """The output `[batch, heads, 1, head_dim]` of a step with these K and V `[batch, kv_heads, 1,
        head_dim]`, one new token per row; None, and nothing has changed, where another way must be taken: a
        full buffer, other shapes, a token that the format refuses."""
        if query.shape != self.asked or keys.shape != self.new or values.shape != self.new:
            return None
        if query.dtype != self.dtype or keys.dtype != self.dtype or query.requires_grad:
            return None
        if store.keys is not self.buffers or store.filled == self.held[0].shape[2]:
            return None
        new = tuple(_bits(x.contiguous()).numpy() for x in (keys, values))
        out = run(self.kernel, query, scaling, new, self.held, ALL, store.filled + 1)
        if out is not None:
            store.filled += 1
        return out


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
