"""Formats: how one token's K or V vector is written down. Exact, packed integers, 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor


class Exact:
    """The numbers as the model made them.

    A format turns `[batch, kv_heads, tokens, head_dim]` into a tuple of tensors
    `[batch, kv_heads, tokens, width]` and back. Every token is written by itself, so a padded batch and a
    single row store the same bits, and nothing that is stored is ever written again.
    """

    def bind(self, head_dim: int) -> None:
        """Check the parameters against the model's head dimension (ValueError)."""

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0] if parts[0].dtype == dtype else parts[0].to(dtype)


class Int(Exact):
    """Symmetric integers with one scale per group of `group` neighbouring channels of one token.

    Source: document 004 ("8-bit KV cache"), absmax / qmax with qmax = 127, 7 or 1; int4 is two values per
    byte, int2 four. The scale is fp16, rounded *up*, so that the error is at most half a step (the scale)
    and zero stays zero.

    bits: 2, 4 or 8 bits per value. group: channels that share a scale; it divides head_dim (default: all
    of head_dim). True cost: bits + 16 / group bits per value.
    Raises ValueError for other bits, for a group that does not divide head_dim, and for values that are
    not finite or too large for an fp16 scale.
    """

    def __init__(self, bits: int = 8, group: int | None = None):
        if bits not in (2, 4, 8):
            raise ValueError(f"bits={bits!r}: expected 2, 4 or 8")
        if group is not None and (not isinstance(group, int) or group < 1):
            raise ValueError(f"group={group!r}: expected a positive number of channels")
        self.bits, self.group = bits, group
        self.qmax = 2 ** (bits - 1) - 1

    def bind(self, head_dim: int) -> None:
        self.group = self.group or head_dim
        if head_dim % self.group:
            raise ValueError(f"group={self.group}: does not divide the head dimension {head_dim}")
        if head_dim % (8 // self.bits):
            raise ValueError(f"bits={self.bits}: head dimension {head_dim} does not fill whole bytes")

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        group = self.group or x.shape[-1]
        grouped = x.float().unflatten(-1, (-1, group))  # [batch, heads, tokens, groups, group]
        scale = _round_up_to_half(grouped.abs().amax(-1) / self.qmax)
        if not torch.isfinite(scale).all():
            raise ValueError(f"int{self.bits}: K or V holds NaN, infinity or a value above fp16's range")
        codes = torch.round(grouped / scale.float().clamp(min=2**-24).unsqueeze(-1)).flatten(-2)
        return _pack(codes.to(torch.int8), self.bits), scale

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        codes = _unpack(parts[0], self.bits)
        scale = parts[1].to(dtype).unsqueeze(-1)
        return codes.to(dtype).unflatten(-1, (parts[1].shape[-1], -1)).mul_(scale).flatten(-2)


class Float8(Exact):
    """8-bit floating point, no scale: e4m3 (3 bits of fraction, up to 448) or e5m2 (fp16 cut in half).

    Source: document 004. format: "e4m3" or "e5m2". Values beyond the format's range become its largest
    value. Raises ValueError for another format and for values that are not finite.
    """

    TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

    def __init__(self, format: str = "e4m3"):
        if format not in self.TYPES:
            raise ValueError(f"format={format!r}: expected one of {', '.join(self.TYPES)}")
        self.format = format

    def encode(self, x: Tensor) -> tuple[Tensor, ...]:
        if not torch.isfinite(x).all():
            raise ValueError(f"fp8 {self.format}: K or V holds NaN or infinity")
        limit = torch.finfo(self.TYPES[self.format]).max
        return (x.clamp(-limit, limit).to(self.TYPES[self.format]).view(torch.uint8),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        if parts[0].is_cuda:
            return parts[0].view(self.TYPES[self.format]).to(dtype)
        # On the CPU the bits are moved to where fp16 has them, which is faster than torch's conversion.
        bits = parts[0].to(torch.int16)
        if self.format == "e5m2":
            return (bits << 8).view(torch.float16).to(dtype)
        bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # exponent bias 7 read as fp16's 15: 2^-8
        return bits.view(torch.float16).to(dtype) * 256


def _round_up_to_half(scale: Tensor) -> Tensor:
    """The smallest fp16 that is not below `scale` (>= 0); infinity and NaN stay what they are."""
    half = scale.half()
    too_small = half.float() < scale
    return torch.where(too_small, (half.view(torch.int16) + 1).view(torch.float16), half)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """int8 codes -> bytes: the last dimension is cut into 8 / bits equal parts that share each byte."""
    if bits == 8:
        return codes
    unsigned = (codes + 2 ** (bits - 1)).to(torch.uint8)
    packed = None
    for place, part in enumerate(unsigned.chunk(8 // bits, dim=-1)):
        packed = part if packed is None else packed | (part << (bits * place))
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of `_pack`: int8 codes."""
    if bits == 8:
        return packed
    mask = 2**bits - 1
    parts = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    return torch.cat(parts, dim=-1).to(torch.int8) - 2 ** (bits - 1)
