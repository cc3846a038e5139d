"""Rotated: lengths, outliers, and caches that equal the full one where nothing is rounded."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import started

from kvlab.store import Exact, Growing, Int, Rotated
from kvlab.store.rotated import block, matrix

WIDTHS = [2, 20, 64, 80, 96, 128, 160]


@pytest.mark.parametrize("width", WIDTHS)
@given(signs=st.booleans(), seed=st.integers(0, 99))
def test_turning_keeps_lengths_and_products_and_can_be_undone(width, signs, seed):
    x, y = torch.randn(2, 3, 5, width, generator=torch.Generator().manual_seed(seed))
    form = Rotated(Exact(), signs)
    assert torch.allclose(form.turn_back(form.turn(x)), x, atol=1e-6)
    assert torch.allclose(form.turn(x).norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
    assert torch.allclose((form.turn(x) * form.turn(y)).sum(-1), (x * y).sum(-1), atol=1e-4)
    one = form.turn(torch.eye(width))
    assert (one != 0).sum(-1).tolist() == [block(width)] * width  # every channel goes into all of its block
    assert torch.allclose(one[one != 0].abs(), torch.tensor(block(width) ** -0.5))


def test_blocks_are_powers_of_two_and_signs_differ():
    assert [block(width) for width in WIDTHS] == [2, 4, 64, 16, 32, 128, 32]
    plain, signed = (matrix(80, signs, torch.device("cpu")) for signs in (False, True))
    assert torch.equal(plain.abs(), signed.abs()) and torch.equal(plain, plain.T)
    flipped = (signed != plain).any(1)  # channels with a sign
    assert torch.equal(signed[flipped], -plain[flipped]) and 30 < flipped.sum() < 50


@pytest.mark.parametrize("bad", [math.nan, math.inf, 5e5])
def test_what_cannot_be_stored_is_refused_by_name_or_replaced_and_counted(bad):
    """5e5 alone could be stored in int4 with fp16 scales, but not what a vector of it is turned to."""
    x = torch.ones(2, 3, 4, 16)
    x[1, 2, 3] = 3e5 if bad == 5e5 else x[1, 2, 3]
    x[1, 2, 3, 5] = bad
    with pytest.raises(ValueError, match=r"int4: KV head 2 holds (NaN or infinity|a value above)"):
        Rotated(Int(4)).encode(x)
    store = started(Growing(Rotated(Int(4, nonfinite="clip"))), 16)
    store.append(x, torch.ones_like(x))
    keys, _ = store.read(x.device)
    assert store.replaced >= 1 and torch.isfinite(keys).all() and torch.allclose(keys[0], x[0], rtol=0.01)
