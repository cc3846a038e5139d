"""The Triton kernel against decode-then-attend; interpreted on the CPU where there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from with_triton import MARK

from kvlab.attention import attend as reference
from kvlab.fast import gpu
from kvlab.store import Exact, Float8, Int, Static
from kvlab.store.static import StaticState

pytestmark = MARK
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = [
    Exact(), Int(8, 32), Int(8, 8), Int(8, scale="fp32"), Int(4, 16), Int(4, axis="token"), Int(2, 16),
    Float8("e4m3"), Float8("e5m2"), Float8("e4m3", group=32),
]  # fmt: skip


def name(form):
    scales = getattr(form, "scales", None)
    return f"{gpu.kind_of(form)}-{scales and (scales.axis, scales.group)}"


def made(form, batch, kv_heads, share, count, head_dim, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    query = torch.randn(batch, kv_heads * share, 1, head_dim).to(DEVICE, dtype)
    keys, values = torch.randn(2, batch, kv_heads, count, head_dim).to(DEVICE, dtype)
    return query, form.encode(keys), form.encode(values)


def expected(query, keys, values, form, allowed=None):
    """In fp32, from the same codes."""
    decoded = form.decode(keys, torch.float32), form.decode(values, torch.float32)
    return reference(query.float(), *decoded, 0.2, allowed)[0]


@pytest.mark.parametrize("form", FORMS, ids=name)
@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_equals_the_reference_in_fp32(form, data):
    batch, kv_heads, share = (data.draw(st.integers(1, top)) for top in (2, 2, 3))
    count, head_dim = data.draw(st.integers(1, 150)), data.draw(st.sampled_from([64, 128]))
    query, keys, values = made(form, batch, kv_heads, share, count, head_dim, seed=count)
    allowed = None
    if data.draw(st.booleans()):
        allowed = torch.rand(batch, data.draw(st.sampled_from([1, kv_heads])), 1, count, device=DEVICE) < 0.5
        allowed[..., -1] = True
    split = data.draw(st.sampled_from([None, 7, 64]))
    out = gpu.attend(query, keys, values, form, 0.2, allowed, split)
    right = expected(query, keys, values, form, allowed)
    assert (out - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("head_dim", [80, 96, 160])
@pytest.mark.parametrize(
    "form", [Exact(), Int(8), Int(4), Int(4, 32), Int(8, 16), Int(2), Float8("e5m2")], ids=name
)
def test_head_dimensions_between_powers_of_two(form, head_dim):
    """Phi-2 has 80, Phi-3-mini 96: the last lanes hold zeros. A group of 32 may cross the bytes' middle."""
    scales = getattr(form, "scales", None)
    if scales is not None and head_dim % (scales.group or head_dim):
        assert not gpu.supports(form, head_dim)
        return
    query, keys, values = made(form, 2, 2, 3, 77, head_dim)
    assert gpu.supports(form, head_dim)
    allowed = torch.rand(2, 1, 1, 77, device=DEVICE) < 0.5
    allowed[..., -1] = True
    for split, seen in ((None, None), (32, allowed)):
        out = gpu.attend(query, keys, values, form, 0.2, seen, split)
        right = expected(query, keys, values, form, seen)
        assert (out - right).abs().max() <= 1e-5 * right.abs().max()


def test_reads_a_static_buffer_in_place():
    """Keys and values that are views of longer buffers, as `Static` hands them out."""
    form = Int(4, 16)
    store = StaticState(Static(200, form), 200)
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 90, 64, device=DEVICE)
    store.append(keys, values)
    query = torch.randn(2, 6, 1, 64, device=DEVICE)
    parts = store.parts()
    assert not parts[0][0].is_contiguous()
    assert gpu.even(parts[0][0], parts[1][0])[0] is parts[0][0], "no copy"
    out = gpu.attend(query, *parts, form, 0.2)
    assert torch.allclose(out, expected(query, *parts, form), atol=1e-5)


@pytest.mark.parametrize("form", [Exact(), Int(8), Int(4, 32), Int(2, 16), Float8("e4m3")], ids=name)
@given(data=st.data())
@settings(max_examples=4, deadline=None)
def test_of_a_buffer_so_many_tokens_as_the_device_says(form, data):
    """What lies behind is never read: it is NaN where that can be written."""
    block = gpu.configured(gpu.kind_of(form), 64, torch.float32, 16, 1)[0]
    capacity = data.draw(st.integers(2 * block, 6 * block))
    count = data.draw(st.sampled_from([1, block - 1, block, block + 1, capacity - 1, capacity]))
    query, keys, values = made(form, 2, 2, 3, capacity, 64, seed=count)
    for part in (*keys, *values):
        spoilt = part[:, :, count:]
        spoilt.view(torch.uint8).random_(0, 256) if part.dtype == torch.uint8 else spoilt.fill_(-1)
        if part.is_floating_point():
            spoilt.fill_(torch.nan)
    allowed = None
    if data.draw(st.booleans()):
        allowed = torch.rand(2, data.draw(st.sampled_from([1, 2])), 1, capacity, device=DEVICE) < 0.5
        allowed[:, :, :, 0] = True
    split = data.draw(st.sampled_from([None, 7, block]))
    told = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    out = gpu.attend(query, keys, values, form, 0.2, allowed, split, told)
    used = [tuple(part[:, :, :count] for part in parts) for parts in (keys, values)]
    right = expected(query, *used, form, None if allowed is None else allowed[..., :count])
    assert (out - right).abs().max() <= 1e-5 * right.abs().max()


def test_what_it_cannot_read_is_refused():
    assert not gpu.supports(Int(8), 72) and not gpu.supports(Int(8), 512)
    assert not gpu.supports(Int(4, 4), 96), "24 scales of a token"
    assert not gpu.supports(Int(8, 32), 80)
    assert not gpu.supports(Int(8, symmetric=False), 64)
    assert not gpu.supports(Int(8, axis="channel"), 64)
    assert not gpu.supports(Float8(axis="tensor"), 64)
    query, keys, values = made(Int(8), 1, 1, 1, 10, 72)
    with pytest.raises(ValueError, match="Int: no kernel for 1 queries of head dimension 72"):
        gpu.attend(query, keys, values, Int(8), 0.2)
