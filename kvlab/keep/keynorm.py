"""Key norm: keep the tokens with the shortest keys (Devoto et al. 2024, arXiv 2406.11430)."""

from __future__ import annotations

from torch import Tensor

from ..named import named
from .base import Keep


@named(
    "keynorm", "The tokens with the shortest keys, and all tokens after the prompt.", "Devoto et al. 2024",
    less="budget=0.4", look="purple < --", technique="eviction by keys",
)  # fmt: skip
class KeyNorm(Keep):
    """After the prompt, drop the tokens with the longest keys. No query is needed.

    Definition: a token's score is minus the L2 norm of its key, per KV head. A rotation does not change a
    norm, so tokens of the same word have equal norms in the first layer except for rounding: norms are
    compared to three decimals, and the older token stays. Tokens written after the prompt all stay.

    budget: tokens of the prompt held (see `Keep`). Deviation: the paper leaves the first two layers whole.
    """

    once = True
    scores_keys = True

    def score(self, layer) -> Tensor:
        keys, _ = layer.store.read(layer.slot_positions.device)  # [batch, kv_heads, slots, head_dim]
        return -keys.float().norm(dim=-1).round(decimals=3)
