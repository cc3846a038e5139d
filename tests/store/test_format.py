"""Formats: error bounds by property, bits by hand, and whole decodes against an independent round trip."""

import math

import pytest
import torch
from drawn import FORMS, numbers
from hypothesis import given
from hypothesis import strategies as st
from tiny import prompt, tiny

import kvlab
from kvlab.store import Exact, Float8, Int


@given(data=st.data())
def test_tokens_are_written_one_by_one(data):
    """Encoding a batch and encoding each token alone give the same bits."""
    x = data.draw(numbers(8))
    for form in (form for form in FORMS if not form.fixed_parts):
        try:
            whole = form.encode(x)
        except ValueError:
            assert x.abs().max() > 448  # more than some formats hold
            continue
        for token in range(x.shape[2]):
            for part, alone in zip(whole, form.encode(x[:, :, token : token + 1]), strict=True):
                assert torch.equal(part[:, :, token : token + 1], alone)


@given(data=st.data())
def test_numbers_of_some_tokens_are_numbers_of_all(data):
    """Every format decodes parts of any tokens, in any order."""
    x, form = data.draw(numbers(8)), data.draw(st.sampled_from(FORMS))
    parts = form.encode(x)
    back = form.decode(parts, x.dtype)
    assert back.shape == x.shape and back.dtype == x.dtype
    order = torch.tensor(data.draw(st.permutations(range(x.shape[2]))))[: max(1, x.shape[2] - 1)]
    moving = len(parts) - form.fixed_parts
    some = (*(part[:, :, order] for part in parts[:moving]), *parts[moving:])
    assert torch.equal(form.decode(some, x.dtype), back[:, :, order])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [form for form in FORMS if type(form) is not Exact], ids=str)
def test_not_finite_is_refused(form, bad):
    x = torch.ones(1, 1, 2, 8)
    x[0, 0, 1, 3] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        form.encode(x)


WRONG = {  # what becomes of a part, or of the numbers that were read
    "one row": lambda x: x[:1],
    "one head": lambda x: x[:, :1],
    "one token": lambda x: x[:, :, :1],
    "an axis more": lambda x: x[..., None],
    "nothing": lambda x: None,
    "a list": lambda x: x.tolist(),
    "an error": lambda x: 1 / 0,
}
OF_NUMBERS = {"wide": lambda x: x.double(), "short": lambda x: x[..., 1:], "without numbers": lambda x: [x]}


@pytest.mark.parametrize("base", [Exact(), Int(8), Int(4), Float8()])
def test_a_format_of_ones_own_that_writes_or_reads_nonsense(base):
    """One line when the cache is made; one that does neither works, and rounds as what it comes from."""
    model, kind = tiny("llama"), type(base)
    given = {name: getattr(base, name) for name in kind.__dataclass_fields__}
    ways = {("write", lambda x, bad=bad: (bad(x[0]), *x[1:])) for bad in WRONG.values()}
    ways |= {("decode", bad) for bad in (WRONG | OF_NUMBERS).values()}
    for name, bad in ways:
        spoilt = lambda *args, name=name, bad=bad: bad(getattr(kind, name)(*args))
        own = type("Own", (kind,), {name: spoilt})
        with pytest.raises(ValueError, match=r"^Own: [^\n]*$"):
            kvlab.KVCache(model, store=own(**given))
    ids, own = prompt(20), type("Own", (kind,), {})
    told = [kvlab.decode(model, ids, kvlab.KVCache(model, store=form), 4) for form in (own(**given), base)]
    assert torch.allclose(told[0].logprobs, told[1].logprobs, atol=1e-4)
