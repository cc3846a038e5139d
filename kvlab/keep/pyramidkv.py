"""PyramidKV: more tokens in lower layers, fewer in higher ones (Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..named import named
from ..parameters import check_number
from .base import prompts
from .snapkv import SnapKV


@named(
    "pyramidkv", "As snapkv, with more tokens in lower layers and fewer in higher ones.",
    "Cai et al. 2024", less="budget=0.4,window=4,beta=4", look="green ^ :",
    technique="eviction by attention",
)  # fmt: skip
@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """As SnapKV, with a budget that falls from layer to layer in equal steps; its mean is `budget`.

    Definition: the highest layer holds budget / beta, the lowest 2 * budget minus that, and those between
    follow a straight line; a layer never holds less than the window or more than the prompt.

    budget, window, kernel: as in `SnapKV`; the budget is the mean over layers. beta: mean budget over
    smallest.
    """

    beta: float = 20

    def __post_init__(self):
        super().__post_init__()
        check_number("beta", self.beta, lambda x: 1 <= x < math.inf, "a number of at least 1")

    def share(self, index: int, layers: int) -> float:
        """The budget of layer `index` of `layers`, as a multiple of the mean."""
        least = 1 / self.beta
        return (2 - least) + index / (layers - 1) * (2 * least - 2) if layers > 1 else 1.0

    def limits(self, layer) -> list[int]:
        share = self.share(layer.order, layer.shape.layers)
        return [
            max(1, min(tokens, max(self.window, int(mean * share + 1e-6))))
            for mean, tokens in zip(super().limits(layer), prompts(layer), strict=True)
        ]
