"""Excerpt: K and V of some slots of a store, still in the form in which the store holds them."""

from __future__ import annotations

import torch
from torch import Tensor

from .format import Exact

Parts = tuple[Tensor, ...]  # a tensor in its stored form: codes, scales, ...


class Excerpt:
    """What a step attends to where that is not all of a store, or lies elsewhere. Reads like a store.

    keys, values: tensors `[batch, kv_heads, slots, width]` in the stored form. format, value_format, plain:
    as in `Growing`. dtype: of the numbers.
    """

    def __init__(self, keys: Parts, values: Parts, format: Exact, value_format: Exact, plain: bool, dtype):
        self.keys, self.values, self.plain, self.dtype = keys, values, plain, dtype
        self.format, self.value_format = format, value_format

    @classmethod
    def of_numbers(cls, keys: Tensor, values: Tensor) -> Excerpt:
        """K and V that have been read."""
        return cls((keys,), (values,), Exact(), Exact(), False, keys.dtype)

    @property
    def length(self) -> int:
        """Slots."""
        return self.keys[0].shape[2]

    def parts(self) -> tuple[Parts, Parts]:
        """K and V in their stored form."""
        return self.keys, self.values

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """K and V as numbers on `device`, `[batch, kv_heads, slots, head_dim]` each."""
        keys, values = (tuple(part.to(device) for part in parts) for parts in (self.keys, self.values))
        return self.format.decode(keys, self.dtype), self.value_format.decode(values, self.dtype)
