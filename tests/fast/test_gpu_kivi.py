"""KIVI's Triton kernels against decode-then-attend; interpreted on the CPU where there is no GPU."""

from types import SimpleNamespace

import pytest
import torch
from tiny import started
from torch.nn.functional import pad
from with_triton import MARK

from kvlab.attention import attend as reference
from kvlab.fast import gpu_kivi
from kvlab.store import Kivi

pytestmark = MARK
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(policy, prompt, steps, head_dim=64, batch=1, kv_heads=2, share=1, dtype=torch.float32, real=None):
    """A query and a store after a prompt and some steps; real `[batch, prompt]`."""
    torch.manual_seed(prompt + steps)
    shape = batch, kv_heads, prompt + steps, head_dim
    keys, values = (torch.randn(shape) + torch.randn(head_dim) for _ in "kv")  # every channel off its centre
    keys, values = keys.to(DEVICE, dtype), values.to(DEVICE, dtype)
    store = started(policy, head_dim)
    real = None if real is None else real.to(DEVICE)
    store.append(keys[:, :, :prompt], values[:, :, :prompt], real)
    for at in range(prompt, prompt + steps):
        store.append(keys[:, :, at : at + 1], values[:, :, at : at + 1])
    return torch.randn(batch, kv_heads * share, 1, head_dim).to(DEVICE, dtype), store


def expected(query, store, allowed=None, scaling=0.2):
    """In fp64, from the same codes and the same window."""
    store.dtype, before = torch.float64, store.dtype
    keys, values = store.read(query.device)
    store.dtype = before
    return reference(query.double(), keys.double(), values.double(), scaling, allowed)[0]


def off(query, store, allowed=None, split=None) -> float:
    right = expected(query, store, allowed)
    out = gpu_kivi.attend(query, store, 0.2, allowed, split)
    assert out.dtype == query.dtype and out.shape == query.shape
    return float((out - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("bits, group, head_dim, share", [
    (2, 16, 64, 1), (4, 16, 80, 4), (2, 32, 80, 1), (4, 32, 128, 1), (2, 64, 128, 4), (4, 64, 64, 4),
])  # fmt: skip
def test_equals_the_reference_in_fp32(bits, group, head_dim, share):
    """117 tokens, of which a first block has 117 - 32 modulo the group; 9 more."""
    query, store = made(Kivi(bits, group, 32), 117, 9, head_dim, share=share)
    assert store.written % group and store.blocks[0].shape[2] > 1
    assert off(query, store) <= 1e-5
    assert off(query, store, split=1) <= 1e-5


@pytest.mark.parametrize(
    "prompt, steps", [(33, 0), (34, 1), (64, 0), (65, 31), (65, 32), (7, 32), (7, 57), (1, 64), (200, 40)]
)
def test_lengths_at_odd_places(prompt, steps):
    """A single written token, whole blocks alone, windows at their shortest and longest."""
    query, store = made(Kivi(2, 32, 32), prompt, steps, share=2)
    assert store.written > 0
    assert off(query, store) <= 1e-5


@pytest.mark.parametrize(
    "bits, group, head_dim", [(8, 32, 64), (2, 5, 48), (4, 24, 16), (4, 64, 256), (2, 70, 64)]
)
def test_other_widths_groups_and_head_dimensions(bits, group, head_dim):
    """Blocks that are no whole number of tiles, or shorter than one; bytes that are fewer than lanes."""
    query, store = made(Kivi(bits, group, 8), 161, 3, head_dim, share=3)
    assert gpu_kivi.supports(store, head_dim) and off(query, store) <= 1e-5
    assert off(query, store, split=1) <= 1e-5


@pytest.mark.parametrize("split", [None, 1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_padding_and_heads_with_masks_of_their_own(heads, split):
    """Three rows: none of the second one's first split is real, nor is any written token of the third."""
    real = torch.arange(117)[None] >= torch.tensor([[0], [70], [110]])
    query, store = made(Kivi(2, 32, 32), 117, 12, batch=3, share=2, real=real)
    allowed = torch.cat([real, real.new_ones(3, 12)], 1)[:, None, None].repeat(1, heads, 1, 1).to(DEVICE)
    allowed[0, -1, :, 40:60] = False
    assert off(query, store, allowed, split) <= 1e-5


def test_a_cropped_window_is_no_whole_tensor():
    query, store = made(Kivi(2, 32, 32), 90, 5)
    store.crop(80)
    assert not store.window[0].is_contiguous() and off(query, store) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [2, 4])
def test_in_16_bits_it_is_as_near_to_the_truth_as_the_reference(bits, dtype):
    query, store = made(Kivi(bits, 32, 32), 130, 3, share=4, dtype=dtype)
    right = expected(query, store)
    plain = reference(query, *store.read(query.device), 0.2)[0]
    allowance = (plain.double() - right).norm() + 1e-3 * right.norm()
    assert (gpu_kivi.attend(query, store, 0.2).double() - right).norm() <= allowance


def test_40000_tokens_in_bf16(monkeypatch):
    """Whatever a tensor core multiplies is rounded to bf16 first, here too: zero points are not among it."""
    if DEVICE == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        def dot(self, a, b, *more, plain=InterpreterBuilder.create_dot):
            for one in (a, b):
                one.data = torch.from_numpy(one.data).bfloat16().float().numpy()
            return plain(self, a, b, *more)

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
    query, store = made(Kivi(2, 64), 40000, 0, 64, kv_heads=1, share=4, dtype=torch.bfloat16)
    right = expected(query, store, scaling=0.125)
    out = gpu_kivi.attend(query, store, 0.125).double()
    assert (out - right).norm() <= 0.01 * right.norm()


@pytest.mark.parametrize("steps", [0, 1, 7, 31])
@pytest.mark.parametrize("masked", [False, True])
def test_of_longer_buffers_so_many_as_the_device_says(steps, masked):
    """As a captured step holds them: what lies behind is never read."""
    query, store = made(Kivi(2, 16, 32), 117, steps, batch=2, share=3)
    written, recent = store.written, store.window[0].shape[2]
    right = expected(query, store)
    longer = SimpleNamespace(group=store.group)
    for name, more in (("keys", 48), ("values", 48), ("blocks", 3)):
        parts = (pad(part, (0, 0, 0, more), value=99) for part in getattr(store, name))
        setattr(longer, name, tuple(parts))
    longer.recents = tuple(pad(side, (0, 0, 0, 9), value=torch.nan) for side in store.window)
    allowed = None
    if masked:
        allowed = torch.rand(2, 1, 1, written + 48 + recent + 9, device=DEVICE) < 0.5
        allowed[..., 3] = True
        seen = torch.cat([allowed[..., :written], allowed[..., written + 48 :][..., :recent]], -1)
        right = expected(query, store, seen)
    counts = torch.tensor([written, recent], dtype=torch.int32, device=DEVICE)
    out = gpu_kivi.attend(query, longer, 0.2, allowed, counts=counts)
    assert (out - right).abs().max() <= 1e-5 * right.abs().max()


def test_what_it_cannot_read_is_refused():
    assert not gpu_kivi.supports(made(Kivi(2, 32, 32), 20, 0)[1], 64), "nothing is written yet"
    query, store = made(Kivi(2, 8, 8), 40, 0, head_dim=72)
    with pytest.raises(ValueError, match="kivi: no kernel for 1 queries of head dimension 72 and 32 written"):
        gpu_kivi.attend(query, store, 0.2)
