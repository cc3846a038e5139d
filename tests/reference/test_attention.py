"""Attention by its formula, in splits, and over buffers reserved at the start."""

import pytest
import torch
from reference.definitions.attention import attend, causal, flash, flash_decoding, kv_head
from reference.definitions.preallocated import Preallocated

from kvlab import attention
from kvlab.arithmetic import kv_bytes
from kvlab.models import ModelShape


@pytest.mark.parametrize("split", [1, 3, 8, 24, 100])
def test_flash_decoding_is_plain_attention(split):
    torch.manual_seed(0)
    query, keys, values = torch.randn(16) * 3, torch.randn(24, 16), torch.randn(24, 16)
    plain = attend(query, keys, values, 0.25)
    assert torch.allclose(flash_decoding(query, keys, values, 0.25, split), plain, atol=1e-6)


def test_splits_of_very_different_scores():
    """Every split subtracts its own largest score; without that, exp(200) would be infinite."""
    keys = torch.tensor([[200.0], [1.0], [-200.0], [199.0]])
    found = flash_decoding(torch.ones(1), keys, torch.eye(4), 1.0, 2)
    assert torch.allclose(found, torch.softmax(keys[:, 0], 0), atol=1e-6)
    assert not torch.isfinite((keys[:, 0]).exp()).all()


@pytest.mark.parametrize("block", [1, 5, 8, 24, 100])
def test_a_prompt_in_blocks_is_plain_attention(block):
    """Causal, with and without a bias on the scores; scores of very different size, too."""
    torch.manual_seed(4)
    queries, keys, values = torch.randn(24, 16) * 20, torch.randn(24, 16), torch.randn(24, 16)
    found = flash(queries, keys, values, 0.25, block)
    assert torch.allclose(found, causal(queries, keys, values, 0.25), atol=1e-5)
    bias = torch.randn(24, 24) * 5
    scores = (queries @ keys.T * 0.25 + bias).masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf)
    assert torch.allclose(
        flash(queries, keys, values, 0.25, block, bias), scores.softmax(1) @ values, atol=1e-5
    )


def test_a_preallocated_cache_step_by_step():
    """*KV Cache* (n.d.): five tokens of prompt, then one at a time; grouped heads; nothing ever moves."""
    torch.manual_seed(2)
    rows, longest, heads, kv_heads, d = 2, 9, 4, 2, 8
    cache = Preallocated(rows + 1, longest, kv_heads, d)  # room for a row more than is used
    queries, keys, values = (torch.randn(rows, longest, n, d) for n in (heads, kv_heads, kv_heads))
    place, size = cache.keys.data_ptr(), cache.keys.nbytes + cache.values.nbytes
    start = 0
    for new in (5, 1, 1, 1, 1):
        end = start + new
        held_keys, held_values = cache.step(start, keys[:, start:end], values[:, start:end])
        assert held_keys.shape == held_values.shape == (rows, end, kv_heads, d)
        assert held_keys.data_ptr() == place  # a view: nothing was copied to read it
        for row in range(rows):
            for head in range(heads):
                kv = kv_head(head, heads, kv_heads)
                query, k, v = queries[row, end - 1, head], held_keys[row, :, kv], held_values[row, :, kv]
                newest = attend(query, k, v, 0.5)
                k, v = keys[row, :end, kv], values[row, :end, kv]
                whole = causal(queries[row, :end, head], k, v, 0.5)  # recomputed, without a cache
                assert torch.allclose(newest, whole[-1], atol=1e-6)
        start = end
    assert (cache.keys[rows] == 0).all()
    assert size == kv_bytes(ModelShape(1, heads * d, heads, kv_heads, 1), longest, rows + 1, bits=32)
    with pytest.raises(ValueError, match="10 tokens: the buffer holds 9"):
        cache.step(9, keys[:, :1], values[:, :1])


@pytest.mark.parametrize(
    ("heads", "queries", "masked"), [(4, 1, False), (4, 1, True), (2, 1, False), (4, 3, True)]
)
def test_cudnn_never_attends_to_what_is_held_on_a_gpu(monkeypatch, heads, queries, masked):
    """It plans anew for every length. How torch is set afterwards is how it was."""
    plain, seen = attention.scaled_dot_product_attention, []

    def attends(*given, **how):
        seen.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return plain(*given, **how)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attends)
    query, (keys, values) = torch.randn(2, heads, queries, 16), torch.randn(2, 2, 2, 9, 16)
    allowed = torch.ones(2, 1, queries, 9, dtype=torch.bool) if masked else None
    for on_gpu in (False, True):
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x, on_gpu=on_gpu: on_gpu))
        attention.attend(query, keys, values, 0.25, allowed)
    assert seen == [(True, True), (False, True)] and torch.backends.cuda.cudnn_sdp_enabled()
