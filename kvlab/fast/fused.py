"""Fused: a decode step's append and its attention in one call of a compiled kernel, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..store.rotated import Rotated
from .attend import ALL, fits, kept_as, prepared, run, writes
from .known import target, vacant


class Fused:
    """The step of a layer whose K and V are on the CPU in one buffer, if every query sees all that is held:
    the kernel appends, attends and, where the keep observes, says what every token received.

    Good as long as its buffers are these and have a free slot: what else a step could ask has been asked.
    heads: query heads.
    """

    def __init__(self, store, heads: int, head_dim: int):
        batch, kv_heads = store.keys[0].shape[:2]
        self.asked = (batch, heads, 1, head_dim)  # shapes of the query, and of K and V
        self.new = (batch, kv_heads, 1, head_dim)
        self.dtype = kept_as(store) or torch.float32
        self.kernel, self.held = prepared(store, self.asked)
        self.buffer = target(store)[0]
        self.turns = any(isinstance(form, Rotated) for form in (store.format, store.value_format))

    @classmethod
    def of(cls, store, query: Tensor) -> Fused | None:
        """For a store and queries like this one; None where no kernel fits, or writes into its buffers."""
        fit = fits(store, query.detach()) and writes(store, query.shape[3])
        return cls(store, query.shape[1], query.shape[3]) if fit else None

    def has_room(self, store) -> bool:
        """Whether the store's buffers are those that it was made for, with a free slot."""
        return target(store)[0] is self.buffer and vacant(store) > 0

    def call(
        self, store, query: Tensor, keys: Tensor, values: Tensor, scaling: float,
        there: Tensor | None = None, received: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """The output `[batch, heads, 1, head_dim]` of a step with these K and V `[batch, kv_heads, 1,
        head_dim]`, one new token per row; None, and nothing has changed, where another way must be taken: a
        full buffer, other shapes, a token that the format refuses.

        there: bool `[batch, 1 or kv_heads, slots]`, in which of them, the new one included, a token is (None:
        in all); received: see `attend_packed`."""
        if query.shape != self.asked or keys.shape != self.new or values.shape != self.new:
            return None
        if any(x.dtype != self.dtype for x in (query, keys, values)) or query.requires_grad:
            return None
        if not self.has_room(store):
            return None
        if self.turns:
            from .turning import turned

            query, keys = (turned(store.format, x) for x in (query, keys))
            values = turned(store.value_format, values)
            if query is None or keys is None or values is None:
                return None
        new = tuple(_bits(x.contiguous()).numpy() for x in (keys, values))
        mask = ALL if there is None else there.numpy()
        out = run(self.kernel, query, scaling, new, self.held, mask, store.length + 1, received)
        if out is None:
            return None
        store.filled += 1
        return turned(store.value_format, out, back=True) if self.turns else out


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
