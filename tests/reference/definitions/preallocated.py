"""Preallocated: K and V of a layer in buffers reserved at the start, written in place (*KV Cache*, n.d.)."""

import torch
from torch import Tensor


class Preallocated:
    """Two buffers `[rows, longest, kv_heads, head_dim]` of zeros."""

    def __init__(self, rows: int, longest: int, kv_heads: int, head_dim: int):
        self.keys = torch.zeros(rows, longest, kv_heads, head_dim)
        self.values = torch.zeros(rows, longest, kv_heads, head_dim)

    def step(self, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new tokens `[batch, new, kv_heads, head_dim]` at position `start`; returns all so far, views
        `[batch, start + new, kv_heads, head_dim]` of the buffers. ValueError where there is no room.
        """
        batch, end = len(keys), start + keys.shape[1]
        if end > self.keys.shape[1]:
            raise ValueError(f"{end} tokens: the buffer holds {self.keys.shape[1]}")
        self.keys[:batch, start:end] = keys
        self.values[:batch, start:end] = values
        return self.keys[:batch, :end], self.values[:batch, :end]
