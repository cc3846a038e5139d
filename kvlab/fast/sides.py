"""Sides: which stores the kernel of `wide.py` reads and writes, and how it is told of them."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..store.codebook import Codebook
from ..store.codebook import levels as levels_of
from ..store.float4 import Float4
from ..store.int import Int
from . import wide
from .known import coded, in_blocks

BLOCKS = {"nvfp4": (wide.NVFP4, 16), "mxfp4": (wide.MXFP4, 32)}  # form, channels that share a scale
ALL_WRITTEN = 2**62  # there is no window


def layout(store, head_dim: int) -> tuple[wide.Side, wide.Side] | None:
    """What the kernel is told of a `readable` store (see `wide.py`), or None where it cannot read it.
    head_dim: a multiple of 32, so that every plane has whole words."""
    form, other = coded(store.format), coded(store.value_format)
    if in_blocks(store):
        if store.recents[1].shape[3] != head_dim:
            return None
        written, short = store.written, (store.recent - store.prompt) % store.group
        return (form.bits, head_dim, store.group, short, written), (form.bits, other.group, 0, 0, written)
    keys, values = _side(form, store.keys, head_dim), _side(other, store.values, head_dim)
    return None if keys is None or values is None else (keys, values)


def _side(form, parts: tuple[Tensor, ...], head_dim: int) -> wide.Side | None:
    if isinstance(form, Float4):
        known, group = BLOCKS[form.format]
        bits = 4
    elif isinstance(form, Int):
        known = bits = form.bits
        group = form.scales.group or head_dim
    elif isinstance(form, Codebook):
        known, bits, group = wide.LEVELS + form.bits, form.bits, head_dim
    else:
        return None
    widths = tuple(part.shape[3] for part in parts)
    fits = widths == (head_dim * bits // 8, -(-head_dim // group))
    return (known, group, 0, 0, ALL_WRITTEN) if fits else None


def writes(store) -> bool:
    """Whether the kernel can write a token as this store's formats do."""
    forms = coded(store.format), coded(store.value_format)
    return not any(
        isinstance(form, Codebook) or (isinstance(form, Float4) and form.largest != 6) for form in forms
    )


def prepared(store, head_dim: int):
    """(The kernel, told of this store; the arrays that hold codes and scales of K and of V)."""
    shape = store.keys[0].shape[:2]
    (keys, *scales), (values, *value_scales) = store.keys, store.values
    if in_blocks(store):
        scales, zeros, window = store.blocks, (store.blocks[1], value_scales[1]), store.recents
    else:
        none = torch.empty(*shape, 0, head_dim, dtype=torch.float32, device="cpu")
        forms, window = (coded(store.format), coded(store.value_format)), (none, none)
        zeros = [
            levels_of(head_dim, form.bits).expand(*shape, 1, -1) if isinstance(form, Codebook) else none
            for form in forms
        ]
    more = *map(_bytes, zeros), *(side.numpy() for side in window)
    held = _words(keys), _bytes(scales[0]), _words(values), _bytes(value_scales[0])
    return partial(wide.kernel, layout(store, head_dim), *more), held


def _words(codes: Tensor) -> np.ndarray:
    return codes.view(torch.int32).numpy()


def _bytes(part: Tensor) -> np.ndarray:
    return part.contiguous().view(torch.uint8).numpy()
