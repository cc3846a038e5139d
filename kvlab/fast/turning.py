"""Turning: vectors times a Hadamard matrix, compiled by numba, to the bit as `store/rotated.py` has it."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ..store.rotated import Rotated, block, signs_of

SURE = np.float32(65504.0)  # a vector up to this is admitted by every format


@njit(nogil=True, cache=True)
def _turn(x, signs, size, back, out):
    """x `[vectors, head_dim]` -> out, in blocks of `size` channels, multiplied by their signs before
    they are turned or, with `back`, afterwards; whether every number of x is at most `SURE`. In fp64, as the
    definition, by sums and differences of halves (the fast Walsh-Hadamard transform)."""
    sure, row = True, np.empty(x.shape[1], np.float64)
    scale = np.float64(size) ** -0.5
    for r in range(x.shape[0]):
        for j in range(x.shape[1]):
            sure = sure and abs(x[r, j]) <= SURE
            row[j] = x[r, j] if back else x[r, j] * signs[j]
        half = 1
        while half < size:
            for start in range(0, x.shape[1], 2 * half):
                for j in range(start, start + half):
                    first, second = row[j], row[j + half]
                    row[j], row[j + half] = first + second, first - second
            half *= 2
        for j in range(x.shape[1]):
            out[r, j] = np.float32(row[j] * scale * (signs[j] if back else 1.0))
    return sure


def turned(form, x: Tensor, back: bool = False) -> Tensor | None:
    """fp32 x `[..., head_dim]` as `form.turn` has it, or `form.turn_back`; itself where the format turns
    nothing. None where the format might not admit x, unless `back`."""
    if not isinstance(form, Rotated):
        return x
    rows = x.contiguous().numpy().reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    sure = _turn(rows, signs_of(rows.shape[1], form.signs), block(rows.shape[1]), back, out)
    return torch.from_numpy(out).view(x.shape) if sure or back else None
