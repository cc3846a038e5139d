"""Scales: what shares one, how it is rounded, what it costs, and which values are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from ..answer import Answer

AXES = ("group", "token", "channel", "tensor")
DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
NONFINITE = ("refuse", "clip")


class Scales(Answer):
    """Which values share a scale, and how it is written down.

    axis: "group": `group` neighbouring channels of one token (document 004's
    `[batch, tokens, heads, groups, group]`). "token": one token's vector in one KV head. "channel": one
    channel of one KV head. "tensor": all of K, or all of V, of a layer and row. The scales of the last two
    run over tokens, so they are fixed by the first tokens that are stored (the prompt); what comes later and
    lies beyond them is clipped, and nothing is ever re-quantized (document 000).
    group: channels, for axis="group" (default: all of head_dim). dtype: "fp16" or "fp32".
    Raises ValueError for anything else.
    """

    def __init__(self, axis: str = "group", group: int | None = None, dtype: str = "fp16"):
        if axis not in AXES:
            raise ValueError(f"axis={axis!r}: expected one of {', '.join(AXES)}")
        if group is not None and (isinstance(group, bool) or not isinstance(group, int) or group < 1):
            raise ValueError(f"group={group!r}: expected a positive number of channels")
        if group is not None and axis != "group":
            raise ValueError(f"group={group}: only with axis='group', not {axis!r}")
        if dtype not in DTYPES:
            raise ValueError(f"scale={dtype!r}: expected one of {', '.join(DTYPES)}")
        self.axis, self.group, self.dtype = axis, group, DTYPES[dtype]

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
        if self.axis == "group":
            self.group = self.group or head_dim
            if head_dim % self.group:
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


def refuse(name: str, x: Tensor, allowed: float) -> None:
    """ValueError that names the first KV head (dimension 1 of x) that cannot be stored."""
    bad = ~(x.abs() <= allowed)
    if bad.any():
        head = int(bad.any(3).any(2).any(0).nonzero()[0])
        value = x[bad][0].item()
        what = f"a value above {allowed:.6g}" if abs(value) < float("inf") else "NaN or infinity"
        raise ValueError(f"{name}: KV head {head} holds {what}")


def clip(x: Tensor, allowed: float) -> tuple[Tensor, int]:
    """x with infinity, NaN and what is too large as the largest value `allowed`, and how many there were."""
    bad = ~(x.abs() <= allowed)
    count = int(bad.sum())
    return (x.nan_to_num(nan=allowed).clamp(-allowed, allowed) if count else x), count
