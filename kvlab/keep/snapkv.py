"""SnapKV: what the end of the prompt looks at (Li et al. 2024, arXiv 2404.14469)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from .base import Keep


class SnapKV(Keep):
    """After the prompt, keep what its last `window` queries attend to, smoothed over neighbours, and these.

    Definition: the attention weights of the last `window` queries are summed for every earlier token, per KV
    head (averaged over the query heads of a group); each token then takes the largest sum within `kernel`
    neighbours, so that clusters stay together. The best tokens fill the budget, window included. Tokens
    written after the prompt all stay: the cache is compressed once.

    budget: tokens of the prompt held (see `Keep`). window: queries that vote, and that always stay. kernel:
    neighbours that share the largest vote, an odd number of tokens.
    """

    watches = True

    def __init__(self, budget: float | int = 0.2, window: int = 16, kernel: int = 5):
        super().__init__(budget)
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window={window!r}: expected a positive number of queries")
        if not isinstance(kernel, int) or kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"kernel={kernel!r}: expected an odd number of tokens")
        self.last_queries, self.kernel = window, kernel
        self._votes: Tensor | None = None  # [batch, kv_heads, slots], until the prompt is compressed

    def observe(self, received: Tensor) -> None:
        self._votes = received

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        votes = self._votes.masked_fill(positions < 0, 0.0)
        pooled = max_pool1d(votes, self.kernel, stride=1, padding=self.kernel // 2)
        lengths = torch.tensor(layer.lengths, device=positions.device).view(-1, 1, 1)
        recent = positions >= lengths - self.last_queries
        # No sum of `window` weights exceeds `window`; in a window above the budget the newest come first.
        return torch.where(recent, self.last_queries + 1 + positions, pooled)

    def choose(self, layer) -> Tensor | None:
        slots = super().choose(layer) if self.watches else None
        self.watches, self._votes = False, None  # the prompt is done
        self.limits = layer.rows_held if slots is None else self.limits
        return slots
