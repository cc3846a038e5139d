"""KeyDiff: keep the tokens whose keys are least alike (Park et al. 2025, arXiv 2504.15364)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from ..named import named
from .base import Keep


@named(
    "keydiff", "The tokens whose keys are least like the others', and all tokens after the prompt.",
    "Park et al. 2025", less="budget=0.4", look="purple v -", technique="eviction by keys",
)  # fmt: skip
class KeyDiff(Keep):
    """After the prompt, drop the tokens whose keys point in the direction of most keys. No query is needed.

    Definition: the anchor of a KV head is the mean of its keys at unit length; a token's score is
    minus the cosine between its key and the anchor. Keys are taken after RoPE, as they are stored. Tokens
    written after the prompt all stay.

    budget: tokens of the prompt held (see `Keep`). Deviation: the paper also drops while a long prompt is
    read block by block; here the whole prompt is there when it is compressed, as in kvpress.
    """

    once = True
    scores_keys = True

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions
        keys, _ = layer.store.read(positions.device)  # [batch, kv_heads, slots, head_dim]
        real = (positions >= 0)[..., None]
        units = normalize(keys.float(), dim=-1).masked_fill(~real, 0.0)
        anchor = units.sum(2, keepdim=True) / real.sum(2, keepdim=True)
        return -cosine_similarity(keys.float(), anchor, dim=-1)
