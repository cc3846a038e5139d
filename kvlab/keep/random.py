"""Random: keep random tokens, the floor that every keep has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..named import named
from ..parameters import shown
from .base import Keep

BITS = 0xFFFFFFFF


@named(
    "random", "Tokens drawn at random, and all tokens after the prompt: the floor for what chooses.",
    less="budget=0.4", look="purple x :", technique="eviction by keys",
)  # fmt: skip
@dataclass(frozen=True)
class Random(Keep):
    """After the prompt, keep tokens drawn at random, different ones in every KV head. It is the baseline for
    every choice.

    Definition: a token's score is a 32-bit hash of its position, KV head, layer and the seed; so a row keeps
    the same tokens alone and in a padded batch. Tokens written after the prompt all stay.

    budget: tokens of the prompt held (see `Keep`). seed: another one draws other tokens.
    """

    seed: int = 0

    once = True

    def __post_init__(self):
        super().__post_init__()
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed <= BITS:
            raise ValueError(f"seed={shown(self.seed)}: expected a whole number from 0 to {BITS}")

    def score(self, layer) -> Tensor:
        positions = layer.slot_positions.long()
        head = torch.arange(layer.kv_heads, device=positions.device).view(1, -1, 1)
        head = head + layer.rank * layer.kv_heads
        mixed = _scramble(torch.full_like(positions, self.seed) ^ _scramble(head + (layer.index << 16)))
        return (_scramble(mixed ^ positions) >> 8).float()  # 24 bits, which a float32 holds


def _scramble(x: Tensor) -> Tensor:
    """A permutation of the 32-bit numbers that mixes all bits (two xorshift-multiplications)."""
    x = x & BITS
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x045D9F3B) & BITS
    return x ^ (x >> 16)
