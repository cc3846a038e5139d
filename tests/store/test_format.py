"""Formats: error bounds by property, bits by hand, and whole decodes against an independent round trip."""

import math

import pytest
import torch
from drawn import FORMS, numbers
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, prompt, tiny
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import kvlab
from kvlab.reference import store as reference
from kvlab.reference.store import integers
from kvlab.store import Exact, Float8, Int
from kvlab.store.int import pack, unpack


@pytest.mark.parametrize("bits", [2, 4, 8])
@given(data=st.data())
def test_integer_error_is_at_most_half_a_step(bits, data):
    group = data.draw(st.sampled_from([4, 8, 20]))
    x = data.draw(numbers(group))
    form = Int(bits, group)
    form.check(x.shape[-1])
    codes, scale = form.encode(x)
    back = form.decode((codes, scale), torch.float32)
    step = scale.float().repeat_interleave(group, -1)
    # A scale below fp16's smallest stores zeros; its step is that smallest number.
    assert ((back - x).abs() <= step.clamp(min=2**-24) * 0.5 * (1 + 1e-5)).all()
    assert (back[x == 0] == 0).all()
    assert codes.shape[-1] * 8 == x.shape[-1] * bits
    assert scale.dtype == torch.float16 and scale.shape[-1] == x.shape[-1] // group


@given(data=st.data())
def test_constant_groups_are_kept_to_the_precision_of_the_scale(data):
    value = data.draw(st.floats(1e-3, 1e4)) * data.draw(st.sampled_from([1, -1]))
    for bits in (2, 4, 8):
        form = Int(bits, 8)
        back = form.decode(form.encode(torch.full((1, 1, 2, 8), value)), torch.float32)
        assert torch.allclose(back, torch.full_like(back, value), rtol=2**-9)


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


def test_packing_is_two_and_four_values_a_byte():
    x = torch.tensor([-7.0, -1, 0, 7, 3, -4, 5, 1]).view(1, 1, 1, 8)
    codes, scale = Int(4).encode(x)
    assert scale.item() == 1.0
    low, high = [-7, -1, 0, 7], [3, -4, 5, 1]
    assert codes.flatten().tolist() == [(a + 8) | (b + 8) << 4 for a, b in zip(low, high, strict=True)]
    codes, _ = Int(2).encode(torch.tensor([1.0, -1, 0, 1]).view(1, 1, 1, 4))
    assert codes.flatten().tolist() == [(1 + 2) | (-1 + 2) << 2 | (0 + 2) << 4 | (1 + 2) << 6]


def test_e5m2_is_the_upper_half_of_fp16():
    x = torch.tensor([1.0, -0.375, 24576.0, 0.0009765625]).view(1, 1, 1, 4)  # two bits of fraction
    stored = Float8("e5m2").encode(x)[0]
    assert torch.equal(stored, (x.half().view(torch.int16) >> 8).to(torch.uint8))


@pytest.mark.parametrize("form, largest", [("e4m3", 448.0), ("e5m2", 57344.0)])
def test_fp8_refuses_or_saturates(form, largest):
    x = torch.tensor([1e6, -1e6, 0.0, 1.0]).view(1, 1, 1, 4)
    with pytest.raises(ValueError, match=rf"fp8 {form} without a scale .*holds a value above {largest:g} "):
        Float8(form).encode(x)
    f = Float8(form, nonfinite="clip")
    assert f.decode(f.encode(x), torch.float32).flatten().tolist() == [largest, -largest, 0.0, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", [form for form in FORMS if type(form) is not Exact], ids=str)
def test_not_finite_is_refused(form, bad):
    x = torch.ones(1, 1, 2, 8)
    x[0, 0, 1, 3] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        form.encode(x)


def test_bad_parameters():
    for bits in (3, 16, 0, "8"):
        with pytest.raises(ValueError, match="bits="):
            Int(bits)
    for bits in (0, 3, 6, 16):
        with pytest.raises(ValueError, match=f"bits={bits}: does not divide 8"):
            pack(torch.zeros(1, 1, 1, 8, dtype=torch.int8), bits)
        with pytest.raises(ValueError, match=f"bits={bits}: does not divide 8"):
            unpack(torch.zeros(1, 1, 1, 8, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match="bits=6: does not divide 8"):
        reference.pack([1, 2, 3, 4], 6)
    for group in (0, -4, 2.5):
        with pytest.raises(ValueError, match="group="):
            Int(8, group)
    with pytest.raises(ValueError, match="format='e3m4'"):
        Float8("e3m4")
    with pytest.raises(ValueError, match="group=5: does not divide the head dimension 8"):
        kvlab.KVCache(tiny("llama"), store=Int(8, 5))
    with pytest.raises(ValueError, match="whole bytes"):
        Int(2).check(6)


class RoundTrip(DynamicLayer):
    """transformers' own growing layer, except that what it holds has been quantized by definition."""

    bits, group = 8, 8

    def update(self, key_states, value_states, *args, **kwargs):
        fresh = not self.is_initialized
        rounded = lambda row: integers(row, 0, self.bits, group=self.group)[1]
        keys, values = (torch.stack([rounded(row) for row in x]) for x in (key_states, value_states))
        super().update(keys, values)
        return (key_states, value_states) if fresh else (self.keys, self.values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_decode_equals_transformers_over_hand_quantized_values(family, bits):
    model, ids, later = tiny(family), prompt(7, rows=2), prompt(3, rows=2, seed=4)
    spec = f"int{bits}:group=4"
    theirs = DynamicCache()
    theirs.layer_class_to_replicate = type("Layer", (RoundTrip,), {"bits": bits, "group": 4})
    theirs.layers = []
    stepper, own = kvlab.Stepper(model, kvlab.make_cache(model, spec)), tiny(family, "sdpa")
    stepper.feed(ids)
    with torch.no_grad():
        own(ids, past_key_values=theirs)
        for step in range(3):
            token = later[:, step : step + 1]
            ours = stepper.feed(token)
            expected = own(token, past_key_values=theirs).logits
            assert torch.allclose(ours, expected, atol=2e-3), (ours - expected).abs().max()
