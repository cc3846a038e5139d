"""Tensors drawn at random for property tests: scales, constant groups, zeros, strides."""

import torch
from hypothesis import strategies as st

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
