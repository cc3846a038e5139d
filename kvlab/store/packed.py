"""Packed: K and V of some slots, in the form in which a store holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .exact import Exact, Parts


@dataclass(frozen=True)
class Packed:
    """What a step attends to where that is not all of a store, or lies elsewhere. Reads like a store.

    keys, values: tensors `[batch, kv_heads, slots, width]` in the stored form. format, value_format:
    what reads them. fixed_keys, fixed_values: the formats' fixed parts. dtype: of the numbers.
    kernel_ready: kernels may read keys and values instead of what `read` returns.
    """

    keys: Parts
    values: Parts
    format: Exact
    value_format: Exact
    dtype: torch.dtype
    fixed_keys: Parts = ()
    fixed_values: Parts = ()
    kernel_ready: bool = False

    @classmethod
    def of_numbers(cls, keys: Tensor, values: Tensor) -> Packed:
        """K and V that have been read."""
        return cls((keys,), (values,), Exact(), Exact(), keys.dtype)

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
        return (
            self.format.decode((*keys, *self.fixed_keys), self.dtype),
            self.value_format.decode((*values, *self.fixed_values), self.dtype),
        )
