"""Float4: the grid and its ties, and what lies beyond its scale."""

import itertools

import pytest
import torch

from kvlab.store import Float4
from kvlab.store.float4 import GRID
from kvlab.store.planes import unpack

FORMS = [Float4(), Float4(largest="4over6"), Float4("mxfp4")]


def read(form, x):
    return form.decode(form.encode(x), torch.float32)


@pytest.mark.parametrize("form", FORMS[::2], ids=lambda form: form.format)
def test_every_number_of_the_grid_and_what_lies_half_way(form):
    """Half-way numbers go to the even code, whatever their sign."""
    signed = [*GRID, *(-x for x in GRID)]
    assert read(form, torch.tensor(signed).view(1, 1, 1, 16)).flatten().tolist() == signed
    halves = [(a + b) / 2 for a, b in itertools.pairwise(GRID)]
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    x = torch.tensor([*halves, 6.0, *(-x for x in halves), -6.0]).view(1, 1, 1, 16)
    assert read(form, x).flatten().tolist() == [*even, 6.0, *(-x for x in even), -6.0]
    codes = unpack(form.encode(x)[0], 4) + 8
    assert (codes[codes != 7] % 2 == 0).sum() >= 14  # but for 6.0 itself


def test_four_over_six_takes_what_errs_less():
    """5 lies between 4 and 6 of the grid: a block of 6 and 5 errs less where 6 is written as 4."""
    x = torch.tensor([6.0, 5.0, 5.0, -5.0] * 4).view(1, 1, 1, 16)
    six, best = (read(form, x) for form in FORMS[:2])
    assert (best - x).norm() < 0.6 * (six - x).norm()
    y = torch.randn(2, 2, 50, 80, generator=torch.Generator().manual_seed(2))
    errors = [(read(form, y) - y).unflatten(-1, (5, 16)).norm(dim=-1) for form in FORMS[:2]]
    assert (errors[1] <= errors[0] * 1.000001).all() and errors[1].norm() < 0.97 * errors[0].norm()
