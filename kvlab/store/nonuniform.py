"""NonUniform: levels where the numbers are, and a few outliers exact (KVQuant, Hooper et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..parameters import check_number, check_one_of
from .exact import Exact, Parts
from .int import NONFINITE, admit, within
from .planes import check_width, pack_planes, sizes, unpack_planes

ROUNDS = 50  # of k-means


@dataclass(frozen=True)
class NonUniform(Exact):
    """Codes of 2^bits levels, spaced by the density of the prompt's numbers, and the exact outliers of every
    vector.

    Numbers are scaled to [-1, 1], by channel or by vector, and the levels are k-means of the prompt's, one
    set for a layer's K and one for its V (Hooper et al. 2024, arXiv 2401.18079, NUQ and dense-and-sparse).
    The prompt gives channels their ranges; vectors have their own. Unlike in the paper, levels are not
    calibrated on other texts, not weighted by gradients, and found per row; and every vector of a head has
    the same number of outliers, while the paper takes all beyond a threshold.

    bits: 2, 3 or 4. axis: "channel" or "token" (a vector of a KV head). outliers: their share; a vector has
    ceil(share * head_dim), in fp16 with their channels, 24 bits each. nonfinite: as in `Int`.
    Parts: codes; channels and values of outliers; by vector, its smallest and largest number in fp16; and,
    fixed by the first tokens, the same by channel in fp32, and the levels.
    """

    bits: int = 3
    axis: str = "channel"
    outliers: float = 0.01
    nonfinite: str = "refuse"

    over_heads = True  # the levels

    def __post_init__(self):
        check_one_of("bits", self.bits, (2, 3, 4))
        check_one_of("axis", self.axis, ("channel", "token"))
        check_number("outliers", self.outliers, lambda part: 0 <= part < 0.5, "a part from 0 to 0.5")
        check_one_of("nonfinite", self.nonfinite, NONFINITE)

    @property
    def fixed_parts(self) -> int:
        return 3 if self.axis == "channel" else 1

    def check(self, head_dim: int) -> None:
        check_width(self.bits, head_dim)
        if self.outliers and head_dim > 256:
            raise ValueError(f"outliers={self.outliers}: head dimension {head_dim} is above 256")

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        return admit(f"{2**self.bits} levels", x.float(), 65504, self.nonfinite)

    def count(self, head_dim: int) -> int:
        """Outliers of a vector."""
        return math.ceil(self.outliers * head_dim)

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        if self.axis != "channel":
            return None
        y = _normal(x, *fixed[:2])
        at, out = self._outliers(y), y.abs() > 1
        return out if at is None else out.scatter(3, at, False)

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        if self.axis == "channel":
            ends = shared = fixed[:2] or self._channels(x, real)
            at, own = self._outliers(_normal(x, *ends)), ()
        else:
            at, shared = self._outliers(x), ()
            rest = x if at is None else x.scatter(3, at, torch.nan)
            low = -(-rest).nan_to_num(nan=-torch.inf).amax(3, keepdim=True)
            own = low.half(), rest.nan_to_num(nan=-torch.inf).amax(3, keepdim=True).half()
            ends = tuple(end.float() for end in own)
        y = _normal(x, *ends).clamp(-1, 1)
        levels = fixed[-1] if fixed else self._levels(y, at, real)
        codes = torch.zeros_like(x, dtype=torch.uint8)
        for border in ((levels[..., 1:] + levels[..., :-1]) / 2).unbind(-1):
            codes += y > border[..., None]
        sparse = () if at is None else (at.to(torch.uint8), x.gather(3, at).half())
        return pack_planes(codes, self.bits), *sparse, *own, *shared, levels

    def _outliers(self, size: Tensor) -> Tensor | None:
        """Channels of every vector's outliers, those with the largest `size`; None without any."""
        if not self.outliers:
            return None
        return size.abs().sort(dim=3, descending=True, stable=True).indices[..., : self.count(size.shape[3])]

    def _channels(self, x: Tensor, real: Tensor | None) -> Parts:
        """Smallest and largest number of every channel without the outliers' share, `[batch, kv_heads, 1,
        head_dim]` each."""
        ends = x.new_zeros(2, len(x), x.shape[1], 1, x.shape[3])
        for row, mine in enumerate(_rows(x, real)):
            if last := mine.shape[1]:
                ranked = mine.sort(dim=1).values
                away = min(math.ceil(self.outliers / 2 * last), (last - 1) // 2)
                ends[0, row, :, 0], ends[1, row, :, 0] = ranked[:, away], ranked[:, last - 1 - away]
        return tuple(end.clone() for end in ends)

    def _levels(self, y: Tensor, at: Tensor | None, real: Tensor | None) -> Tensor:
        """Each row's levels `[batch, 1, 1, 2^bits]`, from its own numbers without the outliers."""
        dense = y if at is None else y.scatter(3, at, torch.nan)
        found = [means(mine[~mine.isnan()], 2**self.bits) for mine in _rows(dense, real)]
        return torch.stack(found)[:, None, None].to(y.device)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        codes = unpack_planes(parts[0], self.bits).long()
        levels = parts[-1].to(codes.device).nan_to_num().expand(*codes.shape[:3], -1)
        low, high = (end.to(codes.device).float() for end in parts[-3:-1])
        numbers = levels.gather(3, codes) * ((high - low) / 2) + (high + low) / 2
        if self.outliers:
            numbers = numbers.scatter(3, parts[1].long(), parts[2].float())
        return within(numbers, dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        heads, tokens, width = shape
        vector = 8 * sum(sizes(width, self.bits)) + 24 * self.count(width) + 32 * (self.axis == "token")
        fixed = 32 * 2**self.bits + (64 * heads * width if self.axis == "channel" else 0)
        return vector / width + fixed / (heads * tokens * width)


def _normal(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """x from [low, high] to [-1, 1]; where these are the same, 0."""
    half = (high - low) / 2
    return ((x - (high + low) / 2) / half.masked_fill(half == 0, torch.inf)).nan_to_num()


def _rows(x: Tensor, real: Tensor | None):
    """Every row of x `[batch, kv_heads, tokens, head_dim]` without its padding."""
    return x if real is None else (row[:, mine] for row, mine in zip(x, real.to(x.device), strict=True))


def means(x: Tensor, count: int) -> Tensor:
    """fp32 levels, ascending, by k-means from evenly spread quantiles: each is the mean of the numbers that
    are nearest to it, or stays where it is if there are none. NaN without any numbers."""
    if len(x) == 0:
        return torch.full((count,), torch.nan, dtype=torch.float32, device="cpu")
    x = x.double().sort().values
    below = torch.cat([x.new_zeros(1), x.cumsum(0)])
    levels = x[((torch.arange(count, dtype=torch.float32, device=x.device) + 0.5) / count * len(x)).long()]
    cuts = None
    for _ in range(ROUNDS):
        before = cuts
        cuts = torch.searchsorted(x, (levels[1:] + levels[:-1]) / 2, right=True)
        cuts = torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), len(x))])
        if before is not None and torch.equal(cuts, before):
            break
        size = cuts.diff()
        levels = torch.where(size > 0, below[cuts].diff() / size.clamp(min=1), levels)
    return levels.float().cpu()
