"""TOVA: drop the token that the newest query looks at least (Oren et al. 2024, arXiv 2401.06104)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Keep


class TOVA(Keep):
    """Keep the tokens with the largest attention weights of the newest query alone.

    Definition: after every pass the weights of its last query are averaged over all heads of the layer, and
    the tokens with the smallest leave, the same ones in every head, for good. The newest token stays.

    budget: tokens held (see `Keep`).
    """

    watches = True
    last_queries = 1

    def __init__(self, budget: float | int = 0.2):
        super().__init__(budget)
        self._weights: Tensor | None = None  # [batch, kv_heads, slots], during a pass

    def observe(self, received: Tensor) -> None:
        self._weights = received.mean(1, keepdim=True).expand_as(received)

    def choose(self, layer) -> Tensor | None:
        slots = super().choose(layer)
        self._weights = None
        return slots

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        return self._weights.masked_fill(positions == positions.amax(-1, keepdim=True), torch.inf)
