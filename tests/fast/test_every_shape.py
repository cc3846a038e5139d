"""The CPU kernel at every head dimension and group, against decode-then-attend.

Most of it runs uncompiled, with every index checked: an overrun that compiled code would not notice is an
IndexError here, within milliseconds. Blocks and splits are short there, so that a few tokens fill several.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from itertools import cycle, product

import llvmlite.binding
import numba
import numpy as np
import pytest
import torch
from tiny import started

import kvlab.fast
from kvlab import attention, fast
from kvlab.fast import cpu, lanes, sides, wide
from kvlab.store import Codebook, Exact, Float4, Float8, Growing, Int, Kivi, Rotated

from .test_attend import close

HEADS = (64, 96, 128, 160, 192, 224, 256)
GROUPS = (16, 32, 64, None)
LENGTHS = (1, 2, 3, 5, 9, 11, 17)  # in blocks of 4 and splits of 8 tokens
INTEGERS = [
    (bits, head_dim, group)
    for bits in (8, 4)
    for head_dim in HEADS
    for group in GROUPS
    if group is None or (head_dim % group == 0 and group < head_dim)
]
FLOATS = [(name, head_dim) for name in ("e4m3", "e5m2") for head_dim in HEADS]
EVERY = product(LENGTHS, ((1, 1), (1, 2), (3, 1), (1, 3)), (False, True))
SHAPES = dict(zip([*INTEGERS, *FLOATS], cycle(EVERY)))  # tokens, (KV heads, query heads for each), mask


class Fenced(np.ndarray):
    """An array that refuses what numpy lets pass: negative indices, and slices that reach beyond its end."""

    def __getitem__(self, where):
        self.check(where)
        return super().__getitem__(where)

    def __setitem__(self, where, what):
        self.check(where)
        super().__setitem__(where, what)

    def check(self, where):
        for index, size in zip(where if isinstance(where, tuple) else (where,), self.shape, strict=False):
            first, last = (index.start or 0, index.stop or 0) if isinstance(index, slice) else (index, index)
            if first < 0 or last < 0 or max(first, last) > size:
                raise IndexError(f"{where} of an array {self.shape}")


class FencedNumpy:
    """numpy whose new arrays are fenced, and full of NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype):
        return np.full(shape, np.nan if np.dtype(dtype).kind == "f" else 77, dtype).view(Fenced)


def numbers(kind, group, codes, steps, t):
    """The numbers of one token, for e4m3 1 / `UNIT` of them."""
    one = torch.from_numpy(np.array(codes[t]))
    if kind == lanes.INT4:
        row = torch.cat([one & 15, one >> 4]).float() - 8
    elif kind == lanes.E4M3:
        row = one.view(torch.float8_e4m3fn).float() / lanes.UNIT
    else:
        row = (one.view(torch.float8_e5m2) if kind == lanes.E5M2 else one).float()
    return row.numpy() * np.repeat(steps[t], group) if group else row.numpy()


def dots(kind, heads, group, width, q, first, codes, steps, size, scores):
    """`lanes.dots` in Python."""
    for t in range((size + 3) // 4 * 4):
        row = numbers(kind, group, codes, steps, min(t, size - 1))
        for s in range(first, first + heads):
            scores[s, t] = q[s] @ row


def add_up(kind, heads, group, width, total, first, weights, codes, steps, size):
    """`lanes.add_up` in Python."""
    for t in range(size):
        row = numbers(kind, group, codes, steps, t)
        for s in range(first, first + heads):
            total[s] += weights[s, t] * row


def largest(scores, s, size, least):
    """`lanes.largest` in Python."""
    return max(least, *(scores[s, t] for t in range(size)))


@pytest.fixture()
def uncompiled(monkeypatch):
    """`attend_packed` runs the kernel as Python, over fenced arrays."""

    def no_njit(function=None, **_):
        return function or no_njit

    def fenced(kernel):
        return lambda *args: kernel(*(a.view(Fenced) if isinstance(a, np.ndarray) else a for a in args))

    def again(compiled):
        name = compiled.__name__
        spec = importlib.util.spec_from_file_location(f"{name}_uncompiled", compiled.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.BLOCK = 4
        module.SPLIT, module.np = 8, FencedNumpy()
        module.dots, module.add_up, module.largest = dots, add_up, largest
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(kvlab.fast, name.rpartition(".")[2], module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba, "njit", no_njit)
        module, other = again(cpu), again(wide)
    interpreted, module.compiled = module.compiled, lambda *layout: fenced(interpreted(*layout))
    other.kernel = fenced(other.kernel)
    monkeypatch.setattr(sides, "wide", other)
    return module


def filled(form, head_dim: int, kv_heads: int, tokens: int, batch: int = 1):
    store = started(form if isinstance(form, Growing) else Growing(form), head_dim, kv_heads)
    store.append(*torch.randn(2, batch, kv_heads, tokens, head_dim))
    return store


def mask(batch: int, heads: int, tokens: int) -> torch.Tensor:
    allowed = torch.rand(batch, heads, 1, tokens) < 0.5
    allowed[..., tokens // 2] = True
    return allowed


def case(form, head_dim, kv_heads, share, tokens, masked, batch=1):
    torch.manual_seed(tokens)
    store = filled(form, head_dim, kv_heads, tokens, batch)
    query = torch.randn(batch, kv_heads * share, 1, head_dim)
    close(store, query, mask(batch, kv_heads, tokens) if masked else None)
    return store, query


@pytest.mark.parametrize("bits, head_dim, group", INTEGERS)
def test_integers_are_right_and_stay_within_bounds(bits, head_dim, group, uncompiled):
    tokens, heads, masked = SHAPES[bits, head_dim, group]
    case(Int(bits, group), head_dim, *heads, tokens, masked)


@pytest.mark.parametrize("name, head_dim", FLOATS)
def test_floats_are_right_and_stay_within_bounds(name, head_dim, uncompiled):
    tokens, heads, masked = SHAPES[name, head_dim]
    case(Float8(name), head_dim, *heads, tokens, masked)


WIDE = [
    *(Int(bits, group) for bits, group in ((3, None), (5, 16), (6, 32), (7, None), (5, None))),
    *(Int(2), Int(2, 8), Int(4, 4), Int(8, 8), Float4("nvfp4"), Float4("nvfp4", "4over6"), Float4("mxfp4")),
    *(Growing(Int(8), Int(4, 16)), Growing(Int(5), Float4()), Growing(Int(4), Int(4, 8))),
    *(Codebook(2), Codebook(3), Rotated(Codebook(4), True), Growing(Rotated(Codebook(3), True), Int(4))),
]


@pytest.mark.parametrize("form, head_dim", [
    (form, head_dim) for i, form in enumerate(WIDE) for head_dim in ((32, 96), (64, 160))[i % 2]
], ids=str)  # fmt: skip
def test_what_is_widened_first_is_right_and_stays_within_bounds(form, head_dim, uncompiled):
    place = (WIDE.index(form) * 4 + head_dim) % len(LENGTHS)
    kv_heads, share = ((1, 1), (1, 2), (3, 1), (1, 3))[place % 4]
    case(form, head_dim, kv_heads, share, LENGTHS[place], head_dim % 3 == 0)


@pytest.mark.parametrize("bits, head_dim, group, recent, share, masked", [
    (2, 32, 3, 2, 1, True), (4, 96, 4, 0, 2, False), (8, 64, 5, 7, 3, True), (2, 160, 32, 5, 1, False),
    (4, 64, 2, 1, 1, True),
])  # fmt: skip
def test_blocks_of_kivi_and_its_window_uncompiled(bits, head_dim, group, recent, share, masked, uncompiled):
    """Blocks that are short, that a kernel's own blocks and splits cut, and windows of every length."""
    torch.manual_seed(bits)
    store = started(Kivi(bits, group, recent), head_dim, 2)
    for tokens in (recent + 3, *[1] * 6):
        store.append(*torch.randn(2, 2, 2, tokens, head_dim))
        query = torch.randn(2, 2 * share, 1, head_dim)
        allowed = mask(2, 2, store.length) if masked else None
        assert store.written and fast.fits(store, query)
        found = fast.attend_packed(query, store, 0.2, allowed)
        read = (side.double() for side in store.read(query.device))
        expected, _ = attention.attend(query.double(), *read, 0.2, allowed)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


GROUPED = {
    **{"full": Exact, "int8": lambda: Int(8), "int4": lambda: Int(4), "int4-g16": lambda: Int(4, 16)},
    **{"e4m3": lambda: Float8("e4m3"), "int5": lambda: Int(5), "nvfp4": lambda: Float4("nvfp4")},
}


@pytest.mark.parametrize("share, head_dim", [(2, 96), (3, 96), (5, 32), (8, 32)])
@pytest.mark.parametrize("name", GROUPED)
def test_heads_of_a_group_together_uncompiled(name, share, head_dim, uncompiled):
    """Groups that fill no whole number of turns."""
    for tokens, masked in ((5, True), (11, False)):
        case(GROUPED[name](), head_dim, 1, share, tokens, masked)


WIDTHS = ((1, 96), (2, 160), (3, 64), (5, 32), (8, 96))  # query heads of a group, width: one for every format


@pytest.mark.parametrize("name", GROUPED)
def test_heads_of_a_group_together(name):
    """Compiled; and each head says, to a few roundings, what it says alone."""
    share, head_dim = WIDTHS[2 * list(GROUPED).index(name) % 5]
    for tokens, masked in ((1, False), (131, True), (4099, False)):
        store, query = case(GROUPED[name](), head_dim, 2, share, tokens, masked)
        together = fast.attend_packed(query, store, 0.2)
        for s in range(share):
            same = query[:, s::share].repeat_interleave(share, 1)  # by the same kernel
            alone = fast.attend_packed(same, store, 0.2)[:, ::share]
            assert torch.allclose(together[:, s::share], alone, rtol=1e-5, atol=1e-6)


AVX2 = "+sse2,+sse4.1,+sse4.2,+ssse3,+popcnt,+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt"


def test_every_code_is_the_number_that_torch_says():
    """A code times 1 is its number, to the bit."""
    exec(NUMBERS, {})


def test_so_it_is_on_a_processor_that_knows_less(tmp_path):
    """Compiled for AVX2 where this one knows AVX-512, for SSE2 elsewhere."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("these are processors of another kind")
    asked = {"NUMBA_CPU_NAME": "generic"}
    if llvmlite.binding.get_host_cpu_features().get("avx512f"):
        asked = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": AVX2}
    told = os.environ | asked | {"NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", NUMBERS], env=told, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


NUMBERS = """
import numpy as np, torch
from numba import njit
from kvlab.fast import lanes

def found(kind, codes):
    width, none = codes.shape[1], np.zeros((0, 0), np.float32)
    channels = 2 * width if kind == lanes.INT4 else width
    unit = lanes.UNIT if kind == lanes.E4M3 else 1

    @njit
    def dots(q, scores):
        lanes.dots(kind, 1, 0, width, q, 0, codes, none, 256, scores)

    @njit
    def add_up(total, weights):
        lanes.add_up(kind, 1, 0, width, total, 0, weights, codes, none, 256)

    numbers, again = np.empty((256, channels), np.float32), np.empty((256, channels), np.float32)
    for j in range(channels):
        q, scores = np.zeros((1, channels), np.float32), np.empty((1, 256), np.float32)
        q[0, j] = unit
        dots(q, scores)
        numbers[:, j] = scores[0]
    for t in range(256):
        total, weights = np.zeros((1, channels), np.float32), np.zeros((1, 256), np.float32)
        weights[0, t] = unit
        add_up(total, weights)
        again[t] = total[0]
    assert np.array_equal(numbers, again)
    return numbers

bytes_ = np.arange(256, dtype=np.uint8)
codes = np.stack([np.roll(bytes_, 8 * j) for j in range(16)], 1).copy()
for kind, dtype in ((lanes.E4M3, torch.float8_e4m3fn), (lanes.E5M2, torch.float8_e5m2)):
    right = torch.from_numpy(codes).view(dtype).float().numpy()
    finite = np.where(np.isfinite(right), codes, 0)
    right = np.where(np.isfinite(right), right, 0)
    assert np.array_equal(found(kind, finite.astype(np.uint8)), right), kind
assert np.array_equal(found(lanes.INT8, codes.view(np.int8)), codes.view(np.int8).astype(np.float32))
both = np.concatenate([codes & 15, codes >> 4], 1).astype(np.float32) - 8
assert np.array_equal(found(lanes.INT4, codes), both)
upper = (codes.astype(np.uint16) * 64 + 7) % 0x7F80
right = (upper.astype(np.uint32) << 16).view(np.float32)
assert np.array_equal(found(lanes.BF16, upper), right)
assert np.array_equal(found(lanes.F32, right), right)
"""


COMPILED = {  # two query heads of a group each, of which other tests have most
    "widened first": (lambda: Growing(Int(5, 32), Float4()), 96),
    "int8": (lambda: Int(8, 32), 64),
    "int4 in thirds": (lambda: Int(4, 32), 96),
    "fp8": (lambda: Float8("e4m3"), 32),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", COMPILED)
def test_nan_and_infinity_do_not_vanish(name, value):
    """In one channel of one query head; K and V refuse both when they are stored."""
    torch.manual_seed(0)
    make, head_dim = COMPILED[name]
    store, query = filled(make(), head_dim, 2, 131), torch.randn(1, 4, 1, head_dim)
    query[0, 1, 0, 5] = value
    found, expected = fast.attend_packed(query, store, 0.2), fast.reference(query, store, 0.2)
    assert found[0, 1].isnan().all() and expected[0, 1].isnan().all()
    assert torch.allclose(found[0, ::2], expected[0, ::2], atol=1e-5)
    with pytest.raises(ValueError, match="NaN or infinity"):
        store.append(query[:, :2], query[:, :2])
