"""Scales: what shares one, how it is rounded, what it costs, and which values are refused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

AXES = ("group", "token", "channel", "tensor")
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
NONFINITE = ("refuse", "clip")


@dataclass(frozen=True)
class Scales:
    """Which values share a scale, and how it is written down.

    axis: "group": `group` neighbouring channels of one token. "token": one token's vector in one KV head.
    "channel": one channel of one KV head. "tensor": all of K, or all of V, of a layer and row. The scales of
    the last two run over tokens, so they are fixed by the first tokens that are stored (the prompt); what
    comes later and lies beyond them is clipped, and nothing is ever re-quantized.
    group: channels, for axis="group" (default: all of head_dim). scale: its dtype, "fp16" or "fp32".
    Raises ValueError for anything else.
    """

    axis: str = "group"
    group: int | None = None
    scale: str = "fp16"

    def __post_init__(self):
        if self.axis not in AXES:
            raise ValueError(f"axis={self.axis!r}: expected one of {', '.join(AXES)}")
        group = self.group
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
            raise ValueError(f"group={group!r}: expected a positive number of channels")
        if group is not None and self.axis != "group":
            raise ValueError(f"group={group}: only with axis='group', not {self.axis!r}")
        if self.scale not in DTYPES:
            raise ValueError(f"scale={self.scale!r}: expected one of {', '.join(DTYPES)}")

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.scale]

    @property
    def fixed(self) -> bool:
        """Whether the first tokens decide for all that follow."""
        return self.axis in ("channel", "tensor")

    @property
    def smallest(self) -> float:
        """The smallest scale above zero."""
        return 2**-24 if self.dtype == torch.float16 else torch.finfo(self.dtype).tiny

    def check(self, head_dim: int) -> None:
        """ValueError for a group that does not divide the head dimension."""
        if self.group is not None and head_dim % self.group:
            raise ValueError(f"group={self.group}: does not divide the head dimension {head_dim}")

    def reduce(self, x: Tensor, largest: bool, real: Tensor | None = None) -> Tensor:
        """The largest (or smallest) value of every group of x `[batch, kv_heads, tokens, head_dim]`.

        Shapes: group `[.., tokens, groups]`, token `[.., tokens, 1]`, channel `[.., 1, head_dim]`, tensor
        `[batch, 1, 1, 1]`. real `[batch, tokens]`: tokens that count where a group runs over tokens.
        """
        pick = torch.amax if largest else torch.amin
        if not self.fixed:
            return pick(x.unflatten(-1, (-1, self.group or x.shape[-1])), -1)
        if real is not None:
            padding = ~real.to(x.device)[:, None, :, None]
            x = x.masked_fill(padding, -torch.inf if largest else torch.inf)
            x = torch.where(padding.all(2, keepdim=True), 0.0, x)  # a row that begins later
        return pick(x, (2,) if self.axis == "channel" else (1, 2, 3), keepdim=True)

    def spread(self, scale: Tensor, like: Tensor) -> Tensor:
        """One number per value: `scale` as `reduce` returns it, fit to multiply `like`."""
        if self.fixed or scale.shape[-1] == 1:
            return scale
        return scale.repeat_interleave(like.shape[-1] // scale.shape[-1], dim=-1)

    def bits_per_value(self, shape: tuple[int, int, int]) -> float:
        """Bits of one scale, shared out to the values; shape: KV heads, tokens, head dimension."""
        heads, tokens, width = shape
        size = {
            "group": self.group or width,
            "token": width,
            "channel": tokens,
            "tensor": heads * tokens * width,
        }
        return self.dtype.itemsize * 8 / size[self.axis]


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The smallest number of `dtype` that is not below `x` (>= 0); infinity and NaN stay what they are."""
    if dtype != torch.float16:
        return x.to(dtype)
    half = x.half()
    return torch.where(half.float() < x, (half.view(torch.int16) + 1).view(torch.float16), half)


def round_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest number of `dtype` that is not above `x`."""
    size = round_up(x.abs(), dtype)
    smaller = x.abs().to(dtype)
    if dtype == torch.float16:
        over = smaller.float() > x.abs()
        smaller = torch.where(over, (smaller.view(torch.int16) - 1).view(torch.float16), smaller)
    return torch.where(x < 0, -size, smaller)


def admit(name: str, x: Tensor, largest: float, nonfinite: str) -> tuple[Tensor, int]:
    """x and 0 where all values are finite and at most `largest`. Otherwise, by `nonfinite`: "refuse" raises a
    ValueError that names the first KV head (dimension 1 of x) that cannot be stored; "clip" returns x with
    infinity, NaN and what is too large as `largest`, and how many there were."""
    bad = ~(x.abs() <= largest)
    if not bad.any():
        return x, 0
    if nonfinite == "clip":
        return x.nan_to_num(nan=largest).clamp(-largest, largest), int(bad.sum())
    head = int(bad.any(3).any(2).any(0).nonzero()[0])
    finite = abs(x[bad][0].item()) < float("inf")
    what = f"a value above {largest:.6g}" if finite else "NaN or infinity"
    raise ValueError(f"{name}: KV head {head} holds {what}")
