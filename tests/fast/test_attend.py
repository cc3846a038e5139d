"""The compiled kernels against torch: loud channels and tokens, buffers, and what the reference does."""

from dataclasses import replace

import pytest
import torch
from tiny import started

from kvlab import fast
from kvlab.store import Exact, Float4, Float8, Growing, Int, Static


def close(store, query, allowed=None):
    assert fast.fits(store, query) and not fast.fits(store, query.double())
    found = fast.attend_packed(query, store, 0.2, allowed)
    expected = fast.reference(query.double(), _double(store), 0.2, allowed)
    assert found.shape == query.shape
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    received = torch.full((*store.keys[0].shape[:2], store.length), torch.nan)
    assert fast.fits(store, query, observed=True)
    assert torch.equal(found, fast.attend_packed(query, store, 0.2, allowed, received))
    told(store, query, allowed, received)


@pytest.mark.parametrize("bits, group", [(8, None), (4, None), (8, 32), (4, 32)])
@pytest.mark.parametrize("largest", [30.0, 1e3, 1e6])
def test_a_channel_that_keys_lack_does_not_drown_the_others(largest, bits, group):
    torch.manual_seed(0)
    store, query = started(Growing(Int(bits, group=group)), 64, 2), torch.randn(1, 4, 1, 64)
    keys, values = torch.randn(2, 1, 2, 700, 64)
    keys[..., 5], query[:, 1, :, 5] = 0, largest
    store.append(keys, values)
    close(store, query)


@pytest.mark.parametrize("bits, group", [(8, None), (4, None), (8, 32), (4, 32)])
@pytest.mark.parametrize("score", [4.0, 12.0, 18.0])
def test_a_token_that_holds_attention_and_no_value_does_not_drown_the_others(score, bits, group):
    torch.manual_seed(1)
    store, query = started(Growing(Int(bits, group=group)), 64, 2), torch.randn(1, 4, 1, 64)
    keys, values = torch.randn(2, 1, 2, 1300, 64)
    loud = query[:, ::2, 0]
    keys[..., 0, :] = loud * score / (0.2 * (loud**2).sum(-1, keepdim=True))
    values[..., 0, :] = 0
    store.append(keys, values)
    close(store, query)


def told(store, query, allowed, received):
    """What tokens received is their softmax weight in fp64, mean over a group's heads, and nothing at all
    where none is seen. `attend` says it in fp32, in which torch's sum is off by over 1e-6 with AVX2."""
    keys, _ = _double(store).read(query.device)
    asked = query.double().unflatten(1, (keys.shape[1], -1))[:, :, :, 0]  # [batch, kv_heads, share, head_dim]
    scores = 0.2 * asked @ keys.transpose(-1, -2)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    expected = scores.softmax(-1).mean(2)
    assert (received - expected).abs().max() <= 1e-6 and not received[expected == 0].any()


def _double(store):
    """The same store, decoding to fp64, so that the reference has no rounding of its own."""
    return replace(store.packed(*store.parts()), dtype=torch.float64)


@pytest.mark.parametrize("bits", [8, 4])
def test_static_buffers_are_read_as_far_as_they_are_used(bits):
    torch.manual_seed(0)
    store = started(Static(42, Int(bits)), 32, 2)
    store.append(*torch.randn(2, 2, 2, 37, 32))
    for part in (*store.keys, *store.values):
        part[:, :, 37:] = 77  # what lies beyond must not matter
    close(store, torch.randn(2, 4, 1, 32))


@pytest.mark.parametrize("form", [Exact(), Int(8), Int(4), Float8(), Int(5), Float4()], ids=str)
@pytest.mark.parametrize("width", [32, 96])
def test_values_of_another_width_than_keys_have_no_kernel(form, width):
    """As in MiMo-V2-Flash: the kernel of int8 read K's width of both."""
    store = started(Growing(form), 64, 2)
    store.append(torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, width))
    assert not fast.fits(store, torch.randn(1, 4, 1, 64))


def test_without_numba_the_reference_is_used_and_that_is_said_once(monkeypatch):
    from kvlab.fast import attend

    store, query = started(Growing(Int(8)), 32, 2), torch.randn(2, 2, 1, 32)
    store.append(*torch.randn(2, 2, 2, 5, 32))
    attend._numba.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "numba", None)
    try:
        with pytest.warns(UserWarning, match="without its compiled kernels"):
            assert not fast.fits(store, query)
        assert not fast.fits(store, query)
    finally:
        attend._numba.cache_clear()
