"""Float4: blocks of 4-bit floats with a small scale of their own, MXFP4 and NVFP4 (Rouhani et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..parameters import check_one_of
from .exact import Exact, Parts
from .float8 import Float8
from .int import NONFINITE, admit
from .planes import pack, unpack

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1: the values of codes 0 to 7
BLOCKS = {"nvfp4": 16, "mxfp4": 32}
LARGEST = (6, "4over6")
E4M3 = Float8("e4m3")


@dataclass(frozen=True)
class Float4(Exact):
    """4-bit floats (e2m1: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6) in blocks of channels of one token.

    mxfp4: 32 channels share a power of two, 2^(floor(log2 largest) - 2), in 8 bits; 4.25 bits per value (OCP
    Microscaling Formats 1.0, 2023; Rouhani et al. 2023, arXiv 2310.10537). nvfp4: 16 channels share
    largest / 6, rounded to e4m3; 4.5 bits (NVIDIA 2025). NVFP4's additional fp32 scale per tensor is left
    out: like fp8 without a scale, values above 2,688 are refused, and a scale up to 2^-10 becomes 0. The grid
    has nothing between 4 and 6; "4over6" uses largest / 4 instead of largest / 6 if the block's error is then
    smaller (Cook et al. 2025, arXiv 2512.02010). A last block may be short.

    format: "nvfp4" or "mxfp4". largest: 6, or "4over6" (nvfp4 alone: steps of a power of two cannot choose).
    nonfinite: as in `Float8`. Parts: codes, two a byte, and a byte of scale for each block.
    """

    format: str = "nvfp4"
    largest: int | str = 6
    nonfinite: str = "refuse"

    def __post_init__(self):
        check_one_of("format", self.format, BLOCKS)
        check_one_of("largest", self.largest, LARGEST)
        check_one_of("nonfinite", self.nonfinite, NONFINITE)
        if self.format == "mxfp4" and self.largest != 6:
            raise ValueError(f"largest={self.largest!r}: only with nvfp4, whose scales are no powers of two")

    @property
    def block(self) -> int:
        """Channels that share a scale."""
        return BLOCKS[self.format]

    def check(self, head_dim: int) -> None:
        if head_dim % 2:
            raise ValueError(f"{self.format}: head dimension {head_dim} does not fill whole bytes")

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        most = 6 * E4M3.largest if self.format == "nvfp4" else torch.finfo(torch.float32).max
        return admit(self.format, x.float(), most, self.nonfinite)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        width = x.shape[-1]
        blocks = pad(x, (0, -width % self.block)).unflatten(-1, (-1, self.block))  # [.., blocks, channels]
        scale = self._scale(blocks.abs().amax(-1), 6)
        codes = self._codes(blocks, scale)
        if self.largest == "4over6":
            other = self._scale(blocks.abs().amax(-1), 4)
            codes_too = self._codes(blocks, other)
            better = self._error(blocks, codes_too, other) < self._error(blocks, codes, scale)
            scale, codes = torch.where(better, other, scale), torch.where(better[..., None], codes_too, codes)
        return pack(codes.flatten(-2)[..., :width] - 8, 4), scale

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes = unpack(parts[0], 4) + 8
        steps = self._steps(parts[1].to(codes.device)).repeat_interleave(self.block, dim=-1)
        return (_numbers(codes) * steps[..., : codes.shape[-1]]).to(dtype)

    def _scale(self, most: Tensor, largest: int) -> Tensor:
        """The byte of every block whose largest magnitude is `most`, fp32."""
        if self.format == "nvfp4":
            return E4M3.write(most / largest)[0]
        exponent = torch.frexp(most).exponent - 1 - 2  # floor(log2 most) - 2
        return torch.where(most > 0, (exponent + 127).clamp(0, 254), 0).to(torch.uint8)

    def _steps(self, scale: Tensor) -> Tensor:
        """The value of a scale's byte, fp32."""
        if self.format == "nvfp4":
            return E4M3.decode((scale,), torch.float32)
        return (scale.int() << 23).view(torch.float32)  # an fp32 number's exponent

    def _codes(self, blocks: Tensor, scale: Tensor) -> Tensor:
        """int8 codes 0 to 15: a sign and the nearest of `GRID`, in a tie the even code."""
        size = blocks.abs() / self._steps(scale).clamp(min=2.0**-126)[..., None]
        # The grid's steps are 1/2 up to 2, 1 up to 4 and 2 beyond, so these lines count them.
        codes = torch.minimum(torch.minimum(2 * size, size + 2), size / 2 + 4).round().clamp(max=7)
        return (codes + 8 * (blocks < 0)).to(torch.int8)

    def _error(self, blocks: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """A block's sum of squared errors."""
        read = _numbers(codes) * self._steps(scale)[..., None]
        return (read - blocks).double().square().sum(-1)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        return 4 + 8 * -(-shape[2] // self.block) / shape[2]


def _numbers(codes: Tensor) -> Tensor:
    """The values of codes 0 to 15, fp32."""
    return _signed(codes.device)[codes.long()]


@cache
def _signed(device: torch.device) -> Tensor:
    """The values of all codes, copied to a device once, since it waits for the copy."""
    return torch.tensor([*GRID, *(-x for x in GRID)], dtype=torch.float32, device=device)
