"""The quantizing kernels of *8-bit KV Cache* (2024), interpreted where there is no GPU, are equal to ours.

Errata: the text's int8 kernel clips an undefined `x` and not what it rounded; `tl.math.round` is no function
of today's Triton; a group of zeros is divided by a scale of 0.
"""

import importlib

import pytest
import torch
from reference.definitions import store as reference
from with_triton import MARK

from kvlab.store import Float8, Int

triton, tl = (importlib.import_module(name) for name in ("triton", "triton.language"))
pytestmark = MARK
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def quantize_int8(
    x, out, out_scale, stride_b, stride_s, stride_h, out_b, out_s, out_h, scale_b, scale_s, scale_h, groups,
    GROUPS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One token of one head: codes `[groups, SIZE]` and a scale for each group, max |x| / 127 in fp16."""
    row, token, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    inside = group[:, None] * SIZE + lane[None, :]
    real = group < groups
    data = tl.load(
        x + row * stride_b + token * stride_s + head * stride_h + inside, mask=real[:, None], other=0.0
    ).to(tl.float32)
    scale = (tl.max(tl.abs(data), axis=1) / 127.0).to(tl.float16)
    by = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))  # a group of zeros
    level = data / by[:, None]
    low = tl.floor(level)
    part = level - low  # to the nearest, half to even, as torch and ours
    up = (part > 0.5) | ((part == 0.5) & (low.to(tl.int32) % 2 != 0))
    code = tl.minimum(tl.maximum(low + up.to(tl.float32), -128.0), 127.0).to(tl.int8)
    tl.store(out + row * out_b + token * out_s + head * out_h + inside, code, mask=real[:, None])
    tl.store(out_scale + row * scale_b + token * scale_s + head * scale_h + group, scale, mask=real)


def quantized(x, size):
    """Codes like x `[batch, tokens, heads, head_dim]` and scales `[batch, tokens, heads, groups]`."""
    batch, tokens, heads, width = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=DEVICE)
    scales = torch.empty(batch, tokens, heads, width // size, dtype=torch.float16, device=DEVICE)
    strides = [stride for part in (x, codes, scales) for stride in part.stride()[:3]]
    count = width // size
    quantize_int8[(batch, tokens, heads)](
        x, codes, scales, *strides, count, GROUPS=triton.next_power_of_2(count), SIZE=size
    )
    return codes.cpu(), scales.cpu()


def nearest(number: float) -> float:
    return float(torch.tensor(number).half())


@pytest.fixture(scope="module", params=[1.0, 30.0])
def x(request):
    """fp16 `[batch, tokens, heads, head_dim]`, 3 groups of 16; one token of zeros."""
    torch.manual_seed(0)
    numbers = (torch.randn(2, 5, 3, 48) * request.param).half()
    numbers[1, 2] = 0
    return numbers.to(DEVICE)


def test_its_codes_and_scales_are_those_of_the_definition(x):
    codes, scales = quantized(x, 16)
    for row, given in enumerate(x.cpu().float().transpose(1, 2)):  # [heads, tokens, head_dim]
        expected, numbers = reference.integers(given, given.shape[1], 8, "group", 16, rounded=nearest)
        assert torch.equal(codes[row].transpose(0, 1).float(), expected)
        decoded = codes[row].float() * scales[row].float().repeat_interleave(16, -1)
        assert torch.equal(decoded.transpose(0, 1), numbers)


def test_it_differs_from_int8_only_in_how_a_scale_is_rounded(x):
    """Ours rounds a scale up, so that all values are within the levels; the text to nearest, and clips."""
    codes, scales = quantized(x, 16)
    parts = Int(bits=8, group=16).write(x.cpu().float().transpose(1, 2))
    ours, our_scales = (part.transpose(1, 2) for part in parts)
    least = torch.finfo(torch.float16).eps
    assert ((our_scales >= scales) & (our_scales.float() <= scales.float() * (1 + 2 * least) + 1e-7)).all()
    same = (our_scales == scales).repeat_interleave(16, -1)
    assert same.any() and not same.all()
    assert torch.equal(ours[same], codes[same])
    assert (ours.int() - codes.int()).abs().max() <= 1


@triton.jit
def to_float8(out, x, count, BLOCK: tl.constexpr):
    """fp16 -> e5m2 by storing through a pointer of that type."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < count).to(tl.float8e5), mask=at < count)


def test_fp16_stored_as_e5m2_is_ours():
    """Every fp16 number. Triton's interpreter rounds ties away from zero, and is wrong where rounding carries
    into the exponent and below the smallest normal number: without a GPU those are left out."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[every.abs() <= reference.FLOATS["e5m2"][2]]
    if DEVICE == "cpu":
        bits = x.view(torch.int16).int() & 0xFFFF
        tie, carry = bits & 0xFF == 0x80, (bits & 0x3FF) > 0x380
        x = x[~tie & ~carry & (x.abs() >= 2**-14)]
        assert len(x) > 50_000
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=torch.int8, device=DEVICE)
    to_float8[(triton.cdiv(len(x), 512),)](triton.reinterpret(out, tl.float8e5), x, len(x), BLOCK=512)
    held = out.cpu().view(torch.float8_e5m2).float()
    form = Float8("e5m2")
    parts = form.write(x.cpu().float()[None, None, None])
    assert torch.equal(held, form.decode(parts, torch.float32)[0, 0, 0])
    some = slice(None, None, 997)
    expected = [reference.float8_byte(value, "e5m2") for value in x.cpu()[some].tolist()]
    assert out.cpu().view(torch.uint8)[some].tolist() == expected
