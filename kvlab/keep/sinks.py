"""Sinks: the first tokens and the most recent ones (StreamingLLM, Xiao et al. 2023, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from .base import Keep


@named(
    "sinks", "The first tokens and a window of recent ones; the rest is dropped.", "Xiao et al. 2023",
    less="budget=0.4", look="purple P -", technique="sinks and a window",
)  # fmt: skip
@dataclass(frozen=True)
class Sinks(Keep):
    """Keep the first few tokens, which soak up attention, and a window of the most recent ones.

    budget: tokens held, sinks included (see `Keep`). sinks: first tokens of the row, which never leave (4 in
    the paper). Deviation: the paper also renumbers positions inside the cache, which is `renumber=True` here
    (see `Keep`); otherwise every key keeps the position it was computed with.
    """

    sinks: int = 4

    def by_rule(self, layer) -> Tensor:
        return layer.slot_positions >= 0  # it only needs the place in the text

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        return torch.where(positions < self.sinks, torch.inf, positions.float())
