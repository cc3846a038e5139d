"""The formulas against torch's own counter and a real cache. Printed figures: oracles/test_figures.py."""

import pytest
import torch
from tiny import prompt
from transformers import GPT2Config, GPT2LMHeadModel

from kvlab.arithmetic import (
    count_flops,
    decode_flops,
    kv_bytes,
    kv_to_weights,
    prefill_flops,
    step_bytes,
    weight_bytes,
)
from kvlab.models import ModelShape


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


def test_a_product_with_a_vector_counts_as_one_with_a_row():
    """torch's own counter knows the second alone, so a query that is asked by hand seemed to cost nothing."""
    weights, x = torch.ones(8, 3), torch.ones(3)
    assert count_flops(lambda: weights @ x) == count_flops(lambda: x[None] @ weights.T) == 2 * 8 * 3


def test_a_decode_step_reads_weights_and_cache_once():
    shape = ModelShape(2, 8, 2, 2, 10)
    assert weight_bytes(shape, bits=8) == 2 * 12 * 64 + 80
    assert step_bytes(shape, 5, batch=3) == weight_bytes(shape) + 3 * 5 * 2 * 2 * 8 * 2
    # allenlu2009 2023: cache over the blocks' weights is b(s + n) / 6h.
    blocks = weight_bytes(ModelShape(2, 8, 2, 2, 0))
    assert kv_bytes(shape, 5, batch=3) / blocks == pytest.approx(kv_to_weights(shape, 5, 3))
