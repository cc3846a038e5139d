"""TOVA: drop the token that the newest query attends to least (Oren et al. 2024, arXiv 2401.06104)."""

from __future__ import annotations

from torch import Tensor

from ..named import named
from ..ranks import all_heads
from .base import Keep


@named(
    "tova", "The tokens that the newest query attends to most; the rest is dropped.", "Oren et al. 2024",
    less="budget=0.4", look="green X -.", technique="eviction by attention",
)  # fmt: skip
class TOVA(Keep):
    """Keep the tokens with the largest attention weights of the newest query alone.

    Definition: after every pass the weights of its last query are averaged over all heads of the layer, and
    the tokens with the smallest ones leave for good, the same in every head. The newest token stays.

    budget: tokens held (see `Keep`). State: `weights` `[batch, kv_heads, slots]`, during a pass.
    """

    observes = True
    last_queries = 1
    per_slot = ("weights",)

    def observe(self, layer, received: Tensor) -> None:
        layer.state.weights = all_heads(layer, received).mean(1, keepdim=True).expand_as(received)

    def forget(self, state) -> None:
        state.weights = None

    def score(self, layer) -> Tensor:
        return layer.state.weights
