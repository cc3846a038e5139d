"""Planes: integers of 3, 5, 6 or 7 bits without unused bits, in planes of 4, 2 and 1 bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from .int import Int, pack, unsigned


@dataclass(frozen=True)
class Planes(Int):
    """Integers whose width does not divide 8: the lowest 4 bits of all codes in one run of bytes, the next 2
    in another, the last one in a third.

    A code of 5 bits is 4 and 1: two codes share a byte of the first plane, eight a byte of the second, and
    nothing is wasted (as in llama.cpp's q5_0, which packs 32 such codes in 16 + 4 bytes). Scales, zero points
    and parameters are those of `Int`; default cost: bits + 16 / head_dim. If the head dimension is no
    multiple of 8, the last byte of a plane may be partly filled; ValueError if even the first plane's is.

    bits: 3, 5, 6 or 7.
    """

    WIDTHS = (3, 5, 6, 7)

    bits: int = 5

    def check(self, head_dim: int) -> None:
        self.scales.check(head_dim)
        check_width(self.bits, head_dim)

    def pack(self, codes: Tensor) -> Tensor:
        return pack_planes((codes + 2 ** (self.bits - 1)).to(torch.uint8), self.bits)

    def unpack(self, packed: Tensor) -> Tensor:
        return unpack_planes(packed, self.bits).to(torch.int8) - 2 ** (self.bits - 1)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        spare = 8 * sum(sizes(shape[2], self.bits)) / shape[2] - self.bits
        return super().bits_per_value(shape, dtype) + spare


def planes(bits: int) -> list[int]:
    """The widths of the planes of a code, lowest bits first: the powers of two that add up to it."""
    return [width for width in (4, 2, 1) if bits & width]


def sizes(head_dim: int, bits: int) -> list[int]:
    """Bytes of every plane of a vector."""
    return [-(-head_dim * width // 8) for width in planes(bits)]


def check_width(bits: int, head_dim: int) -> None:
    """ValueError for a head dimension whose codes do not fill the bytes of the first plane."""
    if head_dim * planes(bits)[0] % 8:
        raise ValueError(f"bits={bits}: head dimension {head_dim} does not fill whole bytes")


@cache
def _head_dim(size: int, bits: int) -> int:
    """The head dimension of vectors whose codes take this many bytes: the only one that fills the first
    plane."""
    step = 8 // planes(bits)[0]
    return next(width for width in range(step, 8 * size + 1, step) if sum(sizes(width, bits)) == size)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes from 0 to 2^bits - 1, bits below 8 -> bytes, plane after plane."""
    packed, done = [], 0
    for width in planes(bits):
        plane = (codes >> done) & (2**width - 1)
        plane = pad(plane, (0, -plane.shape[-1] % (8 // width)))
        packed.append(pack(plane.to(torch.int8) - 2 ** (width - 1), width))
        done += width
    return torch.cat(packed, dim=-1)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_planes`: uint8 codes."""
    head_dim = _head_dim(packed.shape[-1], bits)
    codes, done = 0, 0
    for plane, width in zip(packed.split(sizes(head_dim, bits), dim=-1), planes(bits), strict=True):
        codes = codes | (unsigned(plane, width)[..., :head_dim] << done)
        done += width
    return codes
