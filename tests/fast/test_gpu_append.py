"""What a Triton kernel writes against `encode`; interpreted on the CPU where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from with_triton import MARK

from kvlab.fast import gpu
from kvlab.store import Exact, Float8, Int

pytestmark = MARK
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [Exact(), Int(8), Int(8, 32), Int(4), Int(4, 16), Int(2), Int(2, 8), Float8(), Float8("e5m2")]


def buffers(form, batch, kv_heads, capacity, head_dim, dtype):
    """Two buffers as `form` makes them, all bytes 0x55."""
    like = form.encode(torch.zeros(batch, kv_heads, capacity, head_dim, device=DEVICE, dtype=dtype))
    made = [tuple(part.contiguous().clone() for part in like) for _ in "kv"]
    for part in (*made[0], *made[1]):
        part.view(torch.uint8).fill_(0x55)
    return made


def bits(part):
    return part.contiguous().view(torch.uint8)


@pytest.mark.parametrize("form", FORMS, ids=str)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_writes_what_encode_writes(form, data):
    """Numbers of all sizes, zeros among them, and what torch rounds to even; the other slots stay."""
    head_dim = data.draw(st.sampled_from([64, 96, 128]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    batch, kv_heads, capacity = 2, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    slot = data.draw(st.integers(0, capacity - 1))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    shape = batch, 1, kv_heads, head_dim  # as a projection leaves them
    keys, values = (torch.randn(shape).clamp(-6, 6) * torch.rand(shape[:3] + (1,)).mul(21).sub(15).exp2()
                    for _ in "kv")  # fmt: skip
    keys[0, :, 0], values[:, :, 0, : head_dim // 2] = 0, (values[:, :, 0, : head_dim // 2] * 8).round() / 8
    keys, values = (x.transpose(1, 2).to(DEVICE, dtype) for x in (keys, values))
    made = buffers(form, batch, kv_heads, capacity, head_dim, dtype)
    at = torch.tensor([slot], dtype=torch.int32, device=DEVICE)
    assert not gpu.append(*made, keys, values, form, at)
    for parts, x in zip(made, (keys, values), strict=True):
        for part, wanted in zip(parts, form.encode(x), strict=True):
            assert torch.equal(bits(part[:, :, slot : slot + 1]), bits(wanted))
            part.view(torch.uint8)[:, :, slot] = 0x55
            assert (part.view(torch.uint8) == 0x55).all()


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20])
@pytest.mark.parametrize("side", [0, 1])
def test_says_what_cannot_be_stored(form, value, side):
    x = torch.randn(2, 1, 2, 1, 64, device=DEVICE)
    made = buffers(form, 1, 2, 3, 64, torch.float32)
    at, bad = torch.ones(1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.bool, device=DEVICE)
    assert gpu.append(*made, *x, form, at, bad) is bad and not bad
    x[side, 0, 1, 0, 7] = value
    with pytest.raises(ValueError):
        form.encode(x[side])
    gpu.append(*made, *x, form, at, bad)
    assert bad
    x[side] = 0.0
    gpu.append(*made, *x, form, at, bad)
    assert bad, "it stays"


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_the_largest_that_a_format_takes_is_taken(form):
    largest = 65504.0 * form.qmax if isinstance(form, Int) else form.largest
    made = buffers(form, 1, 1, 1, 64, torch.float32)
    x, at = (
        torch.full((1, 1, 1, 64), largest, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    assert not gpu.append(*made, x, -x, form, at)
    for parts, new in zip(made, (x, -x), strict=True):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(parts, form.encode(new), strict=True))


def test_what_it_does_not_write_is_refused():
    kept = Int(8, symmetric=False), Int(8, axis="channel"), Int(4, scale="fp32"), Int(8, nonfinite="clip")
    for form in (*kept, Float8("e4m3", group=32), Float8(nonfinite="clip")):
        assert not gpu.appends(form)
    made = buffers(Int(8), 1, 1, 2, 72, torch.float32)
    new, at = torch.zeros(1, 1, 1, 72, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="Int: no kernel appends 1 tokens of head dimension 72"):
        gpu.append(*made, new, new, Int(8), at)
    other = [part[:, :, :1] for part in buffers(Int(8), 1, 1, 2, 64, torch.float32)[0]]
    mine = buffers(Int(8), 1, 1, 1, 64, torch.float32)[0]
    new = new[..., :64]
    with pytest.raises(ValueError, match="append: K and V need buffers of the same strides"):
        gpu.append(mine, other, new, new, Int(8), at)
