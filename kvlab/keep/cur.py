"""CurDKV: keep the tokens that weigh most among their neighbours (Sengupta et al. 2025, arXiv 2509.15038)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from ..parameters import check_whole
from .base import Keep, first


@named(
    "curdkv", "Tokens whose keys and values are large beside their neighbours', and all after the prompt.",
    "Sengupta et al. 2025", less="budget=0.4,window=5,sinks=2", look="purple 8 --",
    technique="eviction by keys",
)  # fmt: skip
@dataclass(frozen=True)
class CUR(Keep):
    """After the prompt, drop the tokens with small keys and small values. No query is needed.

    Definition: the leverage of a token is approximated by the squared norm of its key as a share of those in
    its window of neighbouring tokens, and likewise of its value; the score is the product of both shares, per
    KV head. The first tokens stay. Tokens of the same word have equal norms except for rounding: scores are
    compared to six decimals, and the older token stays. Tokens written after the prompt all stay.

    budget: tokens of the prompt held (see `Keep`). window: tokens of a window of the text, by position (16 in
    kvpress, whose approximation of the paper's leverage scores is used here). sinks: first tokens that stay.
    """

    window: int = 16
    sinks: int = 4

    once = True
    scores_keys = True

    def __post_init__(self):
        super().__post_init__()
        check_whole("window", self.window, 1)

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        keys, values = layer.store.read(positions.device)  # [batch, kv_heads, slots, head_dim] each
        window = (positions.clamp(min=0) // self.window).long()
        score = _share(keys, positions, window) * _share(values, positions, window)
        return score.round(decimals=6).masked_fill(first(layer, self.sinks), torch.inf)


def _share(x: Tensor, positions: Tensor, window: Tensor) -> Tensor:
    """Every token's squared norm as a share of its window's, `[batch, kv_heads, slots]`."""
    weight = x.float().square().sum(-1).masked_fill(positions < 0, 0.0)
    total = weight.new_zeros(*weight.shape[:2], int(window.amax()) + 1).scatter_add(2, window, weight)
    return weight / total.gather(2, window).clamp(min=torch.finfo(weight.dtype).tiny)
