"""Device: K and V live where the model computes, and every step reads all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer


class Device(Answer):
    """Everything stays on the device: nothing crosses a link."""

    on_host = False

    def home(self, device: torch.device) -> torch.device:
        """Where the store keeps its tensors when the model computes on `device`."""
        return device

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        """Called once after the prompt: query and keys `[batch, heads or kv_heads, tokens, head_dim]`."""

    def append(self, layer, keys: Tensor) -> None:
        """Called for every later pass with its new keys `[batch, kv_heads, tokens, head_dim]`."""

    def foresee(self, layer, query) -> None:
        """Called before a decode step's previous block runs; `query()` returns the query that this layer
        would ask if its input were that block's input, `[batch, heads, 1, head_dim]`."""

    def read(self, layer, query: Tensor, scaling: float):
        """What this step attends to: (keys, values, slots); slots None means all that is stored."""
        keys, values = layer.store.read(query.device)
        return keys, values, None
