"""The source documents' figures, recomputed; the FLOP formulas against torch's own counter."""

import pytest
import torch
from tiny import prompt, tiny
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

import kvlab
from kvlab.arithmetic import (
    SHAPES,
    count_flops,
    decode_flops,
    kv_bytes,
    kv_bytes_per_token,
    kv_to_weights,
    padded_buffer_bytes,
    prefill_flops,
    read_bandwidth,
    required_bandwidth,
    step_bytes,
    weight_bytes,
)
from kvlab.models import ModelShape


def test_document_000():
    llama = SHAPES["Llama-7B"]
    assert padded_buffer_bytes(llama, 2048, factor=2) == 2_146_435_072
    assert padded_buffer_bytes(llama, 2048, factor=1.5) == 1_609_826_304


def test_document_001():
    opt = SHAPES["OPT-30B"]
    assert kv_bytes_per_token(opt) / 1e6 == pytest.approx(1.376, abs=1e-3)  # "1.3 MB"
    assert kv_bytes(opt, 32 * 1024) / 2**30 == pytest.approx(42.0, abs=0.01)  # printed as 40.6 GB
    wrong = 2 * 48 * 7198 * 2  # the hidden size as printed
    assert wrong != kv_bytes_per_token(opt)
    times = {1: (0.50, 27.99), 2: (0.99, 30.73), 4: (1.97, 36.05), 8: (3.92, 46.91), 16: (7.83, 68.35)}
    printed = {1: 17.99, 2: 32.27, 4: 54.60, 8: 83.60, 16: 114.52}
    for thousand, (size, ms) in times.items():  # the sizes are rounded in print, so within 1 %
        assert required_bandwidth(size, ms / 1e3) == pytest.approx(printed[thousand], rel=0.01)
    longchat = SHAPES["Llama-7B"]
    assert kv_bytes(longchat, 1024) / 2**30 == 0.5  # "0.50 GB" is GiB


def test_document_002():
    gpt3 = SHAPES["GPT-3"]
    assert kv_bytes(gpt3, 100) / 1e6 == pytest.approx(472, abs=0.5)
    assert kv_bytes(gpt3, 512 + 32, batch=64) / 1e9 == pytest.approx(164, abs=0.5)
    assert kv_bytes(gpt3, 2048) / 1e9 == pytest.approx(9.7, abs=0.05)
    assert kv_bytes(SHAPES["Llama-2-7B"], 2048) / 2**30 == 1.0
    assert kv_bytes(SHAPES["Llama-2-7B"], 4096) / 1e9 == pytest.approx(2.1, abs=0.05)
    ratio = kv_bytes(gpt3, 544, batch=64) / (2 * 12 * gpt3.layers * gpt3.hidden**2)
    assert kv_to_weights(gpt3, 544, batch=64) == pytest.approx(ratio)


def test_document_004():
    assert kv_bytes_per_token(SHAPES["Llama-70B-MHA"]) == 2_621_440
    # The document divides by 0.0026 GB, already rounded, and so prints 7,692 tokens and a batch of 3.
    assert int(20e9 / 0.0026e9) == 7692
    assert int(20e9 / kv_bytes_per_token(SHAPES["Llama-70B-MHA"])) == 7629
    assert kv_bytes_per_token(SHAPES["Llama-2-70B"]) * 8 == 2_621_440  # with the real 8 KV heads


def counted(model, ids, cache=None):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, past_key_values=cache, use_cache=cache is not None)
    return counter.get_total_flops()


def test_flops_of_document_003_against_torchs_counter():
    """The prefill formula is right; the decode formula is right once its factors of h are put back."""
    shape = ModelShape(layers=3, hidden=64, heads=4, kv_heads=4, vocabulary=90)
    config = GPT2Config(vocab_size=90, n_embd=64, n_layer=3, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    ids = prompt(24, rows=2) % 90
    # eager attention of transformers computes the full s x s scores, as the formula counts them
    model.set_attn_implementation("eager")
    assert counted(model, ids) == prefill_flops(shape, 24, batch=2)
    # h2o, which watches attention, multiplies matrices that the counter sees; 60 tokens are never reached
    cache = kvlab.make_cache(model, "h2o:budget=60")
    kvlab.Stepper(model, cache).feed(ids)
    step = counted(model, ids[:, :1], cache)
    assert step == decode_flops(shape, 25, batch=2)
    printed = 3 * (24 * 2 * 64**2 + 4 * 2 * 64 + 4 * 2 * 24) + 2 * 2 * 64 * 90 * 64
    assert printed != step


def test_bytes_of_a_real_cache_follow_the_formula():
    model = tiny("llama")
    shape = ModelShape(layers=4, hidden=32, heads=4, kv_heads=2)
    cache = kvlab.make_cache(model, "full")
    kvlab.decode(model, prompt(30, rows=2), cache, 4)
    assert cache.stats().device_bytes == kv_bytes(shape, 33, batch=2, bits=32)


def test_bandwidth_is_measured():
    assert 1e8 < read_bandwidth(seconds=0.01) < 1e13


def test_counted_flops_are_those_of_the_formulas():
    layers, hidden, vocabulary = 2, 32, 96
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=layers, n_embd=hidden, n_head=4, vocab_size=vocabulary, n_positions=64,
            bos_token_id=0, eos_token_id=0,
        )
    ).eval()  # fmt: skip
    shape = ModelShape(layers, hidden, 4, 4, vocabulary)
    for rows, tokens in ((1, 7), (3, 20)):
        ids = prompt(tokens, rows)
        with torch.no_grad():
            assert count_flops(lambda: model(ids, use_cache=False)) == prefill_flops(shape, tokens, rows)  # noqa: B023
            past = model(ids).past_key_values
            step = count_flops(lambda: model(ids[:, :1], past_key_values=past))  # noqa: B023
        assert step == decode_flops(shape, tokens + 1, rows)


def test_a_decode_step_reads_weights_and_cache_once():
    shape = ModelShape(2, 8, 2, 2, 10)
    assert weight_bytes(shape, bits=8) == 2 * 12 * 64 + 80
    assert step_bytes(shape, 5, batch=3) == weight_bytes(shape) + 3 * 5 * 2 * 2 * 8 * 2
    # allenlu2009 2023: cache over the blocks' weights is b(s + n) / 6h.
    blocks = weight_bytes(ModelShape(2, 8, 2, 2, 0))
    assert kv_bytes(shape, 5, batch=3) / blocks == pytest.approx(kv_to_weights(shape, 5, 3))
