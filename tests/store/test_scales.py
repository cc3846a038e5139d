"""Axes and scales: bits counted, what is refused or replaced."""

import pytest
import torch
from drawn import FORMS
from tiny import LESS, SAME, policies, started

from kvlab.store import Exact, Growing


@pytest.mark.parametrize(
    "form",
    FORMS,
    ids=lambda form: type(form).__name__,
)
def test_stated_bits_are_the_bits_of_the_storages(form):
    tokens, heads, width, rows = 13, 2, 8, 3
    store = started(Growing(form), width)
    x = torch.randn(rows, heads, tokens, width)
    store.append(x[:, :, :9], x[:, :, :9])
    store.append(x[:, :, 9:], x[:, :, 9:])
    held = sum(tensor.untyped_storage().nbytes() for tensor in store.tensors()) - store.spare_bytes
    stated = store.format.bits_per_value((heads, tokens, width), x.dtype)
    assert held * 8 == pytest.approx(2 * rows * heads * tokens * width * stated)


@pytest.mark.parametrize("name", [name for name in SAME | LESS if not name.startswith("kivi")])
def test_no_methods_format_is_left_out_above(name):
    """Kivi, which is a buffer and a format in one, has tests of its own."""
    form = policies(name).get("store", Exact())
    form = form if isinstance(form, Exact) else form.format
    assert type(form) is Exact or form in FORMS, f"{name}: {form} is missing in FORMS, tests/drawn.py"
