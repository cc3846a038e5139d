"""Tensors drawn at random for property tests (scales, constant groups, zeros, strides), and every format."""

import itertools

import torch
from hypothesis import strategies as st

from kvlab.store import Codebook, Exact, Float4, Float8, Int, NonUniform, Rotated, Smoothed
from kvlab.store.int import AXES, DTYPES

AXIS_GROUP = [(axis, None) for axis in AXES] + [("group", 4)]
INTS = [
    {"bits": bits, "axis": axis, "group": group, "symmetric": symmetric, "scale": scale}
    for bits, (axis, group), symmetric, scale in itertools.product(
        (2, 4, 8), AXIS_GROUP, (True, False), DTYPES
    )
]
FLOATS = [
    {"format": form, "axis": axis, "group": group, "scale": scale}
    for form, (axis, group), scale in itertools.product(Float8.TYPES, AXIS_GROUP, DTYPES)
]
# Every format, with all that can be set: test_format, test_scales, test_numbers and fast/test_cache go
# through it, so that a new class or width is a line here.
FORMS = [
    Exact(),
    *(Int(**settings) for settings in INTS),
    *(Float8(form) for form in Float8.TYPES),
    *(Float8(**settings) for settings in FLOATS),
    Smoothed(Int(4)),
    *(Rotated(Int(bits), signs) for bits in (2, 4, 8) for signs in (False, True)),
    Rotated(Int(4, 4)),
    Rotated(Int(8, axis="channel", symmetric=False)),
    Smoothed(Rotated(Int(4), True)),
    *(Int(bits, symmetric=symmetric) for bits in (3, 5, 6, 7) for symmetric in (True, False)),
    Int(5, 4),
    Int(5, axis="tensor"),
    Rotated(Int(5)),
    *(NonUniform(*how) for how in ((3, "channel"), (3, "token"), (4, "token", 0.2), (2, "channel", 0))),
    *(Float4(*how) for how in (("nvfp4",), ("nvfp4", "4over6"), ("mxfp4",))),
    *(Rotated(Codebook(bits, sketch), True) for bits in (2, 3, 4) for sketch in (False, True)),
]

SCALES = [1e-30, 1e-7, 1e-3, 1.0, 300.0, 1e4]


@st.composite
def numbers(draw, group):
    rows, heads, tokens, groups = (draw(st.integers(1, 3)) for _ in range(4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    x = torch.randn(rows, heads, tokens, groups * group, generator=generator)
    x = x * draw(st.sampled_from(SCALES))
    if draw(st.booleans()):
        x[..., :group] = draw(st.sampled_from([0.0, 1.0, -2.5]))  # a constant group
    if draw(st.booleans()):
        x[torch.rand(x.shape, generator=generator) < 0.3] = 0.0
    if draw(st.booleans()):
        x = x.transpose(0, 1)  # not contiguous
    return x
