"""H2O: heavy hitters and recent tokens (Zhang et al. 2023, arXiv 2306.14048)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Keep


class H2O(Keep):
    """Keep the tokens that have received the most attention so far, and the most recent ones.

    Definition: acc_j = sum over all queries so far of the softmax weight on token j, per KV head. After the
    prefill the heavy tokens outside the recent window and the window itself stay; at every step the new
    token comes in and the lowest-scoring token outside the window leaves, for good. This is the real, causal
    form: the official repository also has masked forms, one of which looks at future queries.

    budget: tokens held, heavy + recent (see `Keep`). recent: part of the budget that is the recent window
    (0.5 in the paper's scripts: equal halves). Under grouped-query attention acc is averaged over the query
    heads of a group.
    """

    watches = True
    per_slot = ("received",)

    def __init__(self, budget: float | int = 0.2, recent: float = 0.5):
        super().__init__(budget)
        if not isinstance(recent, int | float) or not 0 <= recent <= 1:
            raise ValueError(f"recent={recent!r}: expected a part of the budget between 0 and 1")
        self.recent = recent
        self.received: Tensor | None = None  # acc, [batch, kv_heads, slots]

    def observe(self, received: Tensor) -> None:
        if self.received is not None:
            received[..., : self.received.shape[-1]] += self.received
        self.received = received

    def score(self, layer) -> Tensor:
        device = self.received.device
        window = torch.tensor([max(1, int(limit * self.recent)) for limit in self.limits], device=device)
        lengths = torch.tensor(layer.lengths, device=device)
        oldest_recent = (lengths - window).view(-1, 1, 1)
        return torch.where(layer.slot_positions >= oldest_recent, torch.inf, self.received)
