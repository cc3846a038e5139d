"""Axes and scales: bits counted, rows gathered, what is refused or replaced."""

import math

import pytest
import torch
from drawn import FORMS, INTS
from hypothesis import given
from hypothesis import strategies as st
from tiny import LESS, SAME, policies, started

from kvlab.store import Exact, Float8, Growing, Int, Static

pytestmark = pytest.mark.uncounted


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


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("make", [lambda **o: Int(8, **o), lambda **o: Float8("e5m2", "token", **o)])
def test_what_cannot_be_stored_is_refused_by_name_or_replaced_and_counted(make, bad):
    x = torch.ones(2, 3, 4, 8)
    x[1, 2, 3, 5] = bad
    with pytest.raises(ValueError, match=r"KV head 2 holds (NaN or infinity|a value above)"):
        make().encode(x)
    form = make(nonfinite="clip")
    back = form.decode(form.encode(x), torch.float32)
    assert form.admit(x)[1] == 1 and torch.isfinite(back).all()
    assert abs(back[1, 2, 3, 5]) > 1e6 and (back[1, 2, 3, 5] < 0) == (bad == -math.inf)
    assert torch.allclose(back[0], x[0], rtol=0.01)
    store = started(Growing(make()))
    with pytest.raises(ValueError, match=r"values: .*KV head 2"):
        store.append(torch.ones_like(x), x)


def test_what_comes_later_is_clipped_to_the_fixed_range():
    form = Int(8, axis="channel")
    _, *fixed = form.encode(torch.tensor([1.0, -2.0]).view(1, 1, 1, 2))
    later = form.encode(torch.tensor([50.0, 1.0]).view(1, 1, 1, 2), fixed=tuple(fixed))
    assert torch.allclose(form.decode(later, torch.float32).flatten(), torch.tensor([1.0, 1.0]), atol=0.02)


@given(
    settings=st.sampled_from(INTS), tokens=st.integers(1, 9), kept=st.integers(1, 9), more=st.integers(1, 5),
    seed=st.integers(0, 99), buffer=st.sampled_from([Growing, Static]),
)  # fmt: skip
def test_gathering_packed_rows_is_gathering_numbers(settings, tokens, kept, more, seed, buffer):
    """Rows of any length, picked head by head in their packed form, and tokens appended behind them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 2, tokens + more, 8, generator=generator)
    store = started(Static(30, Int(**settings)) if buffer is Static else buffer(Int(**settings)))
    store.append(x[:, :, :tokens], x[:, :, :tokens] * 2)
    before = store.read(x.device)[0].clone()
    slots = torch.randint(0, tokens, (2, 2, kept), generator=generator)
    fetched = store.pick(slots).read(x.device)[0]
    store.keep_slots(slots)
    store.append(x[:, :, tokens:], x[:, :, tokens:] * 2)
    after = store.read(x.device)[0]
    assert after.shape[2] == store.length == kept + more
    wanted = before.gather(2, slots[..., None].expand(-1, -1, -1, 8))
    assert torch.equal(after[:, :, :kept], wanted) and torch.equal(fetched, wanted)
    codes = 8 // settings["bits"]
    assert all(part.shape[-1] == 8 // codes for part in (store.keys[0], store.values[0]))
