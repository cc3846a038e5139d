"""Rotated: rotate every vector by a Hadamard matrix before it is rounded (QuaRot, Ashkboos et al. 2024)."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..modes import keeping
from ..parameters import check_bool, check_kind
from .exact import Exact, Parts
from .int import within


@dataclass(frozen=True)
class Rotated(Exact):
    """Rotate every vector of a head before it is quantized, and back when it is read.

    A rotated channel is a signed sum of all channels, so none is an outlier any more, and a shared scale fits
    all of them (Ashkboos et al. 2024, arXiv 2404.00456). The Walsh-Hadamard matrix H over sqrt(n) changes no
    length, and q k = (q H)(k H) / n: a kernel that reads the codes gets a rotated query, and its output is
    rotated back, one vector each per step. As in llama.cpp, vectors are rotated after RoPE and in blocks of n
    channels; here n is the largest power of two that divides the head dimension, for K and V (there 64 for
    V), so a head dimension of 80 has five blocks of 16.

    format: the format of the rotated vectors, which costs no more bits. signs: QuaRot's random signs on the
    channels before the rotation; drawn once, the same everywhere. ValueError for an odd head dimension.
    """

    format: Exact
    signs: bool = False

    def __post_init__(self):
        check_kind("format", self.format, Exact, "a format")
        check_bool("signs", self.signs)

    @property
    def over_heads(self) -> bool:
        return self.format.over_heads

    @property
    def fixed_parts(self) -> int:
        return self.format.fixed_parts

    def check(self, head_dim: int) -> None:
        self.format.check(head_dim)
        if head_dim % 2:
            raise ValueError(
                f"rotate: the head dimension {head_dim} is odd, so no two channels can be turned"
            )

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        x, replaced = self.format.admit(x)
        x, more = self.format.admit(self.turn(x))  # a rotated channel can exceed all of them
        return x, replaced + more

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        return self.format.beyond(x, fixed)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        return self.format.write(x, real, fixed)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        numbers = self.format.decode(parts, torch.promote_types(dtype, torch.float32))
        return within(self.turn_back(numbers), dtype)

    def turn(self, x: Tensor) -> Tensor:
        return self._times(x, matrix(x.shape[-1], self.signs, x.device))

    def turn_back(self, x: Tensor) -> Tensor:
        return self._times(x, matrix(x.shape[-1], self.signs, x.device).T)

    def _times(self, x: Tensor, turning: Tensor) -> Tensor:
        # In fp64 the sums of fp32 numbers are (nearly) exact, so their order and the batch do not matter.
        return ((x.double() @ turning) * block(x.shape[-1]) ** -0.5).to(x.dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return self.format.bits_per_value(shape, dtype)


def block(head_dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides the head dimension."""
    return head_dim & -head_dim


@cache
def signs_of(head_dim: int, drawn: bool) -> np.ndarray:
    """fp64 `[head_dim]`: the channels' signs, drawn once, the same everywhere; or all 1."""
    draw = random.Random(0)
    return np.array([1.0 if not drawn or draw.random() < 0.5 else -1.0 for _ in range(head_dim)])


@cache
@keeping()
def matrix(head_dim: int, signs: bool, device: torch.device) -> Tensor:
    """fp64 `[head_dim, head_dim]`: blocks of H, rows times the channels' signs; entries 1, -1 and 0."""
    size = block(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float64, device="cpu")
    while len(hadamard) < size:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device="cpu").double(), hadamard)
    found = torch.block_diag(*[hadamard] * (head_dim // size))
    return (found * torch.from_numpy(signs_of(head_dim, signs))[:, None]).to(device)
