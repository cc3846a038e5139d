"""Sinks: the first tokens and the most recent ones (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Keep


class Sinks(Keep):
    """Keep the first few tokens, which soak up attention, and a window of the most recent ones.

    budget: tokens held, sinks included (see `Keep`). sinks: first tokens of the row that never leave (4 in
    the paper). Deviation: the paper renumbers positions inside the cache; here every key keeps the position
    it was computed with.
    """

    def __init__(self, budget: float | int = 0.2, sinks: int = 4):
        super().__init__(budget)
        if not isinstance(sinks, int) or sinks < 0:
            raise ValueError(f"sinks={sinks!r}: expected a number of tokens >= 0")
        self.sinks = sinks

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        # A budget no larger than the sinks still leaves room for the newest token.
        sinks = [min(self.sinks, limit - 1) for limit in self.limits]
        first = positions < torch.tensor(sinks, device=positions.device).view(-1, 1, 1)
        return torch.where(first, torch.inf, positions.float())
