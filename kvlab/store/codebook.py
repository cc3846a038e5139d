"""Codebook: a vector's size, and per channel the nearest of few levels (TurboQuant, Zandieh et al. 2025)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..modes import keeping
from ..parameters import check_bool, check_one_of
from .exact import Exact, Parts
from .int import NONFINITE, admit, within
from .planes import check_width, pack_planes, sizes, unpack_planes

LARGEST, SMALLEST = 65504, 2**-24  # of fp16, above 0
CELLS = 20_000  # of the density


@dataclass(frozen=True)
class Codebook(Exact):
    """Write a vector as its root mean square and, per channel, the nearest of 2^bits levels.

    Inside `Rotated` with signs it is TurboQuant (Zandieh et al. 2025, arXiv 2504.19874): a randomly rotated
    vector has the same distribution as a random point on a sphere, in every model, so the best levels for its
    channels are known beforehand (Lloyd 1982, Max 1960). Nothing is calibrated. The paper uses a random
    rotation and stores the norm, which is this size times sqrt(head_dim); here the rotation is a Hadamard
    matrix. sketch: one of the bits becomes the sign of a random projection of the rounding error, so that
    products with a query have no bias (the paper's second quantizer); their variance grows, which costs
    accuracy.

    bits: 2, 3 or 4 per value, of which a sketch takes one. nonfinite: as in `Int`. Cost: bits + 16 / head_dim
    per value, plus 16 / head_dim with a sketch. Parts: codes, size and, with a sketch, signs and their size.
    """

    bits: int = 4
    sketch: bool = False
    nonfinite: str = "refuse"

    def __post_init__(self):
        check_one_of("bits", self.bits, (2, 3, 4))
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        check_bool("sketch", self.sketch)

    @property
    def width(self) -> int:
        """Bits of a code."""
        return self.bits - self.sketch

    def check(self, head_dim: int) -> None:
        check_width(self.width, head_dim)
        if self.sketch:
            check_width(1, head_dim)

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        return admit(f"codebook of {self.bits} bits", x.float(), LARGEST, self.nonfinite)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        size = _size(x)
        found = levels(x.shape[-1], self.width).to(x.device)
        borders = (found[1:] + found[:-1]) / 2
        codes = torch.bucketize(x / size.float().clamp(min=SMALLEST), borders).to(torch.uint8)
        if not self.sketch:
            return pack_planes(codes, self.width), size
        left = x - found[codes.long()] * size.float()
        signs = left.double() @ projection(x.shape[-1], x.device).T > 0
        return pack_planes(codes, self.width), size, pack_planes(signs.to(torch.uint8), 1), _size(left)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes = unpack_planes(parts[0], self.width)
        head_dim = codes.shape[-1]
        numbers = levels(head_dim, self.width).to(codes.device)[codes.long()] * parts[1].float()
        if self.sketch:
            signs = unpack_planes(parts[2], 1).double() * 2 - 1
            guess = math.sqrt(math.pi / 2 / head_dim) * (signs @ projection(head_dim, signs.device))
            numbers = numbers + guess.float() * parts[3].float()
        return within(numbers, dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        codes = sum(sizes(shape[2], self.width)) + self.sketch * sum(sizes(shape[2], 1))
        return (8 * codes + (2 if self.sketch else 1) * 16) / shape[2]


def _size(x: Tensor) -> Tensor:
    """Root mean square of vectors, fp16 `[..., 1]`; summed in fp64, so that the order of the sum does not
    matter."""
    return x.double().square().mean(-1, keepdim=True).sqrt().half()


@cache
@keeping()
def levels(head_dim: int, bits: int) -> Tensor:
    """The 2^bits numbers, fp32 and ascending, with the smallest rounding error for a channel of a random
    vector of root mean square 1: each is the mean of the values nearest to it (Lloyd 1982). Density: that of
    a coordinate of a point on a sphere, (1 - x^2 / d)^((d - 3) / 2)."""
    edge = min(math.sqrt(head_dim), 9.0)
    ends = torch.linspace(-edge, edge, CELLS + 1, dtype=torch.float64, device="cpu")
    x = (ends[1:] + ends[:-1]) / 2
    density = (1 - x.square() / head_dim) ** ((head_dim - 3) / 2)
    sums = torch.stack([density, density * x])
    below = torch.cat([sums.new_zeros(2, 1), sums.cumsum(1)], 1)  # of each cell's lower end
    found = torch.linspace(-0.9, 0.9, 2**bits, dtype=torch.float64, device="cpu") * min(edge, bits)
    for _ in range(10_000):
        cuts = (found[1:] + found[:-1]) / 2
        cell = torch.searchsorted(ends, cuts) - 1
        part = (cuts - ends[cell]) / (ends[1] - ends[0])
        at = torch.cat([below[:, :1], below[:, cell] + part * sums[:, cell], below[:, -1:]], 1)
        mass, moment = at.diff(dim=1)
        before, found = found, moment / mass
        if (found - before).abs().max() < 1e-10:
            break
    return ((found - found.flip(0)) / 2).float()


@cache
@keeping()
def projection(head_dim: int, device: torch.device) -> Tensor:
    """A sketch's matrix S, fp64 `[head_dim, head_dim]`, standard normal: drawn once, for all heads."""
    draw = random.Random(0)
    rows = [[draw.gauss(0.0, 1.0) for _ in range(head_dim)] for _ in range(head_dim)]
    return torch.tensor(rows, dtype=torch.float64, device=device)
