"""Exact: unrounded numbers, and the interface of every format."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import kind_and_line
from ..policy import Policy

Parts = tuple[Tensor, ...]  # tensors in their stored form: codes, scales, ...


@dataclass(frozen=True)
class Exact(Policy):
    """The numbers unrounded, as the model computed them.

    A format turns `[batch, kv_heads, tokens, head_dim]` into a tuple of tensors
    `[batch, kv_heads, tokens, width]` and back. Every token is encoded alone, so a padded batch and a single
    row store the same bits, and stored tokens are never rewritten. A format has no state: if the first tokens
    decide for all later ones (`fixed_parts`), the store passes their decision back.
    """

    over_heads = False  # True: all KV heads of a layer share numbers, which are decided together
    fixed_parts = 0  # number of last parts that the first tokens decide; they hold no token

    def check(self, head_dim: int) -> None:
        """ValueError for parameters that do not fit the model's head dimension."""

    def admit(self, x: Tensor) -> tuple[Tensor, int]:
        """(x without values that cannot be stored, how many were replaced); or a ValueError that names the
        first KV head. A format that works with the numbers returns them in fp32 (`int.admit`)."""
        return x, 0

    def given(self, rows: int) -> Parts:
        """The fixed parts of `rows` rows, if they are known before the first token."""
        return ()

    def beyond(self, x: Tensor, fixed: Parts) -> Tensor | None:
        """Which admitted numbers exceed the range of the first tokens and are clipped, bool like x; None:
        none can."""

    def cut(self, x: Tensor, fixed: Parts) -> int:
        """How many admitted numbers `write` replaced, since what it stores in their place is beyond the
        format."""
        return 0

    def write(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()) -> Parts:
        """The parts of admitted numbers, each `[batch, kv_heads, tokens, width]`; the last `fixed_parts` of
        them have no tokens.

        real and fixed (see `encode`) matter only where tokens share a number, with `fixed_parts` above 0: the
        first call gets fixed=() and decides from the real tokens alone, later ones use `fixed` and return it
        again.
        """
        return (x,)

    def encode(self, x: Tensor, real: Tensor | None = None, fixed: Parts = ()):
        """Numbers -> parts. real: bool `[batch, tokens]`, which tokens are no padding (default: all); fixed:
        the last `fixed_parts` parts of the first tokens that were encoded."""
        return self.write(self.admit(x)[0], real, fixed)

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """Parts, of all tokens or some, in any order -> numbers `[batch, kv_heads, tokens, head_dim]`."""
        return parts[0] if parts[0].dtype == dtype else parts[0].to(dtype)

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        """True bits for each number of one row's K or V, scales and all: those of the tensors that `write`
        returns. shape: KV heads, tokens, head dimension; dtype: the model's."""
        return dtype.itemsize * 8


def check_own(form: Exact, width: int) -> None:
    """ValueError for a format of one's own that does not write every token of a row and a head, or does not
    read it again, tried with numbers between -1 and 1."""
    if form.ours:
        return
    x = torch.linspace(-1, 1, 12 * width, device="cpu").view(2, 2, 3, width)
    try:
        parts = form.encode(x, None, form.given(2))
        each = parts[: len(parts) - form.fixed_parts]
        back = form.decode(parts, x.dtype)
        found = [*(tuple(part.shape[:3]) for part in each), (*back.shape, back.dtype)]
        if not isinstance(parts, tuple) or any(len(part) != 2 for part in parts[len(each) :]):
            raise TypeError("write and fix return tuples of tensors, those of fix [batch, ...]")
    except Exception as error:
        raise ValueError(f"{type(form).__name__}: {kind_and_line(error)}") from error
    if found != [x.shape[:3]] * len(each) + [(*x.shape, x.dtype)]:
        raise ValueError(
            f"{type(form).__name__}: expected parts [batch, kv_heads, tokens, width], and again "
            f"{tuple(x.shape)} of {x.dtype}, got {found}"
        )
