"""PyramidKV: more tokens in lower layers, fewer in higher ones (Cai et al. 2024, arXiv 2406.02069)."""

from __future__ import annotations

from torch import Tensor

from ..answer import resolve_budget
from .snapkv import SnapKV


class PyramidKV(SnapKV):
    """As SnapKV, with a budget that falls from layer to layer in equal steps; its mean is `budget`.

    Definition: the highest layer holds budget / beta, the lowest 2 * budget less that, those between lie on
    the line; a layer never holds less than the window, nor more than the prompt.

    budget, window, kernel: as in `SnapKV`, the budget being the mean over layers. beta: mean over least.
    """

    def __init__(self, budget: float | int = 0.2, window: int = 16, kernel: int = 5, beta: float = 20):
        super().__init__(budget, window, kernel)
        if not isinstance(beta, int | float) or not beta >= 1:
            raise ValueError(f"beta={beta!r}: expected a number of at least 1")
        self.beta = beta
        self.share = 1.0  # of the mean, this layer's

    def bind(self, shape, layer: int, model=None) -> None:
        least = 1 / self.beta
        depth = layer / max(1, shape.layers - 1)
        self.share = (2 - least) + depth * (2 * least - 2) if shape.layers > 1 else 1.0

    def choose(self, layer) -> Tensor | None:
        if self.limits is None:
            means = [resolve_budget(self.budget, tokens) for tokens in layer.lengths]
            self.limits = [
                min(tokens, max(self.last_queries, int(mean * self.share + 1e-6)))
                for mean, tokens in zip(means, layer.lengths, strict=True)
            ]
        return super().choose(layer)
