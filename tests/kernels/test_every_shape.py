"""The CPU kernel at every head dimension and group, against decode-then-attend.

Most of it runs uncompiled, with every index checked: an overrun that compiled code would not notice is an
IndexError here, within milliseconds. Blocks and splits are short there, so that a few tokens fill several.
"""

import importlib.util
import sys
from dataclasses import replace
from itertools import cycle

import numba
import numpy as np
import pytest
import torch
from tiny import started

import kvlab.kernels
from kvlab import attention, kernels
from kvlab.kernels import attend, cpu, wide
from kvlab.store import Float4, Float8, Growing, Int, Kivi, Planes

HEADS = (40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256)
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
SHAPES = dict(
    zip(  # every format meets another (KV heads, query heads for each, tokens, mask)
        [*INTEGERS, *FLOATS],
        cycle(
            (kv_heads, share, tokens, masked)
            for tokens in LENGTHS
            for kv_heads, share in ((1, 1), (1, 2), (3, 1), (1, 3))
            for masked in (False, True)
        ),
        strict=False,
    )
)


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
        module.BLOCK, module.SPLIT, module.np = 4, 8, FencedNumpy()
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(kvlab.kernels, name.rpartition(".")[2], module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba, "njit", no_njit)
        module, other = again(cpu), again(wide)
    interpreted, module.compiled = module.compiled, lambda *layout: fenced(interpreted(*layout))
    other._kernel = fenced(other._kernel)
    return module


def filled(form, head_dim: int, kv_heads: int, tokens: int, batch: int = 1):
    store = started(form if isinstance(form, Growing) else Growing(form), head_dim, kv_heads)
    store.append(*torch.randn(2, batch, kv_heads, tokens, head_dim))
    return store


def agree(store, query, allowed=None):
    """attend_packed is decode-then-attend in fp64."""
    double = replace(store.packed(*store.parts()), dtype=torch.float64)
    found = kernels.attend_packed(query, store, 0.2, allowed)
    expected = kernels.reference(query.double(), double, 0.2, allowed)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    received = torch.full((*store.keys[0].shape[:2], store.length), torch.nan)
    assert torch.equal(found, kernels.attend_packed(query, store, 0.2, allowed, received))
    counted = torch.ones(len(query), 1, dtype=torch.bool)
    _, expected = attention.attend(query.double(), *double.read(query.device), 0.2, allowed, counted)
    assert (received - expected).abs().max() <= 1e-6 and not received[expected == 0].any()


def mask(batch: int, heads: int, tokens: int) -> torch.Tensor:
    allowed = torch.rand(batch, heads, 1, tokens) < 0.5
    allowed[..., tokens // 2] = True
    return allowed


def case(form, head_dim, kv_heads, share, tokens, masked, batch=1):
    torch.manual_seed(tokens)
    store = filled(form, head_dim, kv_heads, tokens, batch)
    query = torch.randn(batch, kv_heads * share, 1, head_dim)
    agree(store, query, mask(batch, kv_heads, tokens) if masked else None)
    return store, query


@pytest.mark.uncounted
@pytest.mark.parametrize("bits, head_dim, group", INTEGERS)
def test_integers_are_right_and_stay_within_bounds(bits, head_dim, group, uncompiled):
    store, query = case(Int(bits, group), head_dim, *SHAPES[bits, head_dim, group])
    assert kernels.fits(store, query) == (head_dim % 32 == 0)


@pytest.mark.parametrize("name, head_dim", FLOATS)
def test_floats_are_right_and_stay_within_bounds(name, head_dim, uncompiled):
    store, query = case(Float8(name), head_dim, *SHAPES[name, head_dim])
    assert kernels.fits(store, query) == (head_dim % 32 == 0)


WIDE = [
    *(Planes(bits, group) for bits, group in ((3, None), (5, 16), (6, 32), (7, None), (5, None))),
    *(Int(2), Int(2, 8), Float4("nvfp4"), Float4("nvfp4", "4over6"), Float4("mxfp4")),
    *(Growing(Int(8), Int(4, 16)), Growing(Planes(5), Float4()), Growing(Int(4), Int(4, 8))),
]


@pytest.mark.parametrize("head_dim", [32, 64, 96, 160])
@pytest.mark.parametrize("form", WIDE, ids=str)
def test_what_is_widened_first_is_right_and_stays_within_bounds(form, head_dim, uncompiled):
    place = (WIDE.index(form) * 4 + head_dim) % len(LENGTHS)
    kv_heads, share = ((1, 1), (1, 2), (3, 1), (1, 3))[place % 4]
    store, query = case(form, head_dim, kv_heads, share, LENGTHS[place], head_dim % 3 == 0)
    assert kernels.fits(store, query)


@pytest.mark.parametrize("form", [Planes(3), Planes(5, 16), Int(2), Float4()], ids=str)
def test_halves_of_words_are_left_to_the_reference(form):
    store = filled(form, 80, 1, 3)
    assert not kernels.fits(store, torch.randn(1, 1, 1, 80))


@pytest.mark.parametrize("bits, head_dim, group, recent, share", [
    (2, 32, 3, 2, 1), (4, 96, 4, 0, 2), (8, 64, 5, 7, 3), (2, 160, 32, 5, 1), (4, 64, 2, 1, 1),
])  # fmt: skip
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_kivi_and_its_window_uncompiled(bits, head_dim, group, recent, share, masked, uncompiled):
    """Blocks that are short, that a kernel's own blocks and splits cut, and windows of every length."""
    torch.manual_seed(bits)
    store = started(Kivi(bits, group, recent), head_dim, 2)
    for tokens in (recent + 3, *[1] * 9):
        store.append(*torch.randn(2, 2, 2, tokens, head_dim))
        query = torch.randn(2, 2 * share, 1, head_dim)
        allowed = mask(2, 2, store.length) if masked else None
        assert store.written and kernels.fits(store, query)
        found = kernels.attend_packed(query, store, 0.2, allowed)
        read = (side.double() for side in store.read(query.device))
        expected, _ = attention.attend(query.double(), *read, 0.2, allowed)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("share", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_heads_lengths_and_masks_uncompiled(kv_heads, share, masked, uncompiled):
    for tokens in LENGTHS:
        case(Int(4, 8), 24, kv_heads, share, tokens, masked)


@pytest.mark.parametrize("bits, head_dim, group", INTEGERS)
def test_asymmetric_codes_are_left_to_the_reference(bits, head_dim, group):
    store = filled(Int(bits, group, symmetric=False), head_dim, 1, 3)
    assert not kernels.fits(store, torch.randn(1, 1, 1, head_dim))


@pytest.mark.parametrize("kind", range(4))
def test_pieces_cover_every_code_once_and_lie_in_one_group(kind):
    for head_dim in range(2, 513, 2):
        for group in (g for g in range(1, head_dim + 1) if head_dim % g == 0):
            width = head_dim // 2 if kind == cpu.INT4 else head_dim
            piece, short, sides = cpu.pieces(kind, head_dim, group)
            assert width % piece == 0 and piece % short == 0 and width % (short * sides) == 0
            for start in [*range(0, width, piece), *(range(width, head_dim, piece))]:
                assert start // group == (start + piece - 1) // group


def test_a_weight_beside_which_nothing_counts_is_0(uncompiled):
    """And no subnormal number, nor is NaN lost."""
    faint = [float(uncompiled._faint(np.float32(x))) for x in (0, -1, -63.9, -64.1, -1e30, -np.inf, np.nan)]
    assert faint[:3] == pytest.approx([1, np.exp(-1), np.exp(-63.9)], rel=1e-5)
    assert faint[3:6] == [0, 0, 0] and np.isnan(faint[6])


COMPILED = {
    "widened first": (lambda: Growing(Planes(5, 32), Float4()), 96),
    "int8": (lambda: Int(8, 32), 96),
    "int4": (lambda: Int(4, 64), 192),
    "int4 in thirds": (lambda: Int(4, 32), 96),
    "fp8": (lambda: Float8("e4m3"), 160),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled(name, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(attend, "ALONE", 0)
    make, head_dim = COMPILED[name]
    for tokens in (1, 2, 3, 5, 127, 128, 129, 131, 4097):
        for kv_heads, share, masked in ((1, 1, True), (3, 1, False), (1, 2, False), (3, 3, True)):
            store, query = case(make(), head_dim, kv_heads, share, tokens, masked, batch=2)
            assert kernels.fits(store, query)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_it_writes_nothing_around_its_results(name):
    make, head_dim = COMPILED[name]
    store, band = filled(make(), head_dim, 1, 5), 64
    around = torch.full((2 * band + head_dim + 2,), 77.0)
    parts = around[band:-band].view(1, 1, -1).numpy()
    query, out = torch.randn(1, 1, 1, head_dim), torch.empty(1, 1, head_dim)
    kernel, held = attend.prepared(store, query.shape)
    given = query.numpy(), np.float32(1.0), *attend.nothing(held), *held, attend.ALL
    said = torch.full((2 * band + 5,), 77.0)
    watched = np.empty((1, 1, 5), np.float32), said[band:-band].view(1, 5).numpy()
    kernel(*given, 5, 0, 1, parts, out.numpy(), *watched)
    for outside in (around, said):
        assert (outside[:band] == 77).all() and (outside[-band:] == 77).all()
    assert (parts != 77).all() and (said[band:-band] <= 1).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", COMPILED)
def test_nan_and_infinity_do_not_vanish(name, value):
    """In one channel of one query head; K and V refuse both when they are stored."""
    torch.manual_seed(0)
    make, head_dim = COMPILED[name]
    store, query = filled(make(), head_dim, 3, 131), torch.randn(1, 3, 1, head_dim)
    query[0, 1, 0, 5] = value
    found, expected = kernels.attend_packed(query, store, 0.2), kernels.reference(query, store, 0.2)
    assert found[0, 1].isnan().all() and expected[0, 1].isnan().all()
    assert torch.allclose(found[0, ::2], expected[0, ::2], atol=1e-5)
    with pytest.raises(ValueError, match="NaN or infinity"):
        store.append(query, query)
