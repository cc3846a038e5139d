"""Planes: codes of up to 8 bits as bytes, without unused bits, in planes of 4, 2 and 1 bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad


def planes(bits: int) -> list[int]:
    """The widths of the planes of a code, lowest bits first: the powers of two that add up to it."""
    return [width for width in (8, 4, 2, 1) if bits & width]


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


def pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes around 0 -> bytes; those of 8 bits are bytes already."""
    return codes if bits == 8 else pack_planes((codes + 2 ** (bits - 1)).to(torch.uint8), bits)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack`."""
    return packed if bits == 8 else unpack_planes(packed, bits).to(torch.int8) - 2 ** (bits - 1)


def pack_planes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes from 0 to 2^bits - 1, bits below 8 -> bytes, plane after plane: in one of w bits the last
    dimension is cut into 8 / w equal parts, which share each byte; its last byte may be partly filled."""
    packed, done = [], 0
    for width in planes(bits):
        plane = (codes >> done) & (2**width - 1)
        byte, *others = pad(plane, (0, -plane.shape[-1] % (8 // width))).chunk(8 // width, dim=-1)
        for place, part in enumerate(others, 1):
            byte = byte | (part << (width * place))
        packed.append(byte)
        done += width
    return torch.cat(packed, dim=-1)


def unpack_planes(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_planes`: uint8 codes."""
    if planes(bits) == [bits]:
        return _unpacked(packed, bits)
    head_dim = _head_dim(packed.shape[-1], bits)
    codes, done = 0, 0
    for plane, width in zip(packed.split(sizes(head_dim, bits), dim=-1), planes(bits), strict=True):
        codes = codes | (_unpacked(plane, width)[..., :head_dim] << done)
        done += width
    return codes


def _unpacked(plane: Tensor, width: int) -> Tensor:
    parts = [(plane >> (width * place)) & (2**width - 1) for place in range(8 // width)]
    return torch.cat(parts, dim=-1)
