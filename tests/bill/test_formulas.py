"""The bill against formulas written out here."""

import itertools

import pytest
from billed import MODELS, held

import kvlab
from kvlab.arithmetic import (
    causal_pairs,
    cost_per_million,
    experts_read,
)
from kvlab.bill import data
from kvlab.bill.account import account, policies, weights
from kvlab.methods import METHODS
from kvlab.spec import parse


@pytest.mark.parametrize("tokens, window", [(1, None), (9, None), (9, 4), (3, 4), (4, 4), (9, 1)])
def test_causal_pairs_are_counted(tokens, window):
    pairs = [(q, k) for q in range(tokens) for k in range(q + 1) if window is None or q - k < window]
    assert causal_pairs(tokens, window) == len(pairs)


def test_experts_that_a_step_reads():
    """The mean over all ways in which two tokens each take 2 of 4 experts."""
    ways = list(itertools.product(itertools.combinations(range(4), 2), repeat=2))
    assert experts_read(4, 2, 2) == pytest.approx(sum(len({*a, *b}) for a, b in ways) / len(ways))
    assert experts_read(4, 2, 1) == 2 and experts_read(8, 2, 10_000) == pytest.approx(8)


def test_a_bill_by_hand():
    bill = kvlab.bill(
        "Llama-3.1-8B", "H100 80GB", "8k", users=4, price=2.0, methods=["full", "int4", "offload"]
    )
    token = 2 * 32 * 8 * 128 * 2
    read = 2 * (6_979_588_096 + 525_336_576)
    full = bill["full"]
    assert bill.weights_bytes == 2 * 8_030_261_248 and full.device_bytes == 4 * 8192 * token
    assert full.step == pytest.approx((read + 4 * 8192 * token) / 3350e9) and full.first == "bandwidth"
    assert full.users == int((80e9 - bill.weights_bytes) // (8192 * token))
    assert full.cost == pytest.approx(2.0 * full.step / 3600 * 1e6 / 4)
    assert bill["int4"].device_bytes == 4 * 8192 * token * (4 + 16 / 128) / 16
    offload = bill["offload"]
    assert offload.host_bytes == full.device_bytes and offload.device_bytes == full.device_bytes / 32
    assert offload.step == pytest.approx(4 * (8192 + 1) * token / 64e9) and offload.first == "link"
    operations = 2 * (8192 * 6_979_588_096 + 525_336_576 + 32 * 2 * 4096 * 8192 * 8193 / 2)
    assert bill.prefill == pytest.approx(operations / 989.4e12)
    assert bill.prefill_cost == pytest.approx(cost_per_million(2.0, bill.prefill, 8192))


def test_a_model_whose_attention_picks_reads_less_than_it_holds():
    """DeepSeek-V3.2: 2,048 latents of those held, and every index key."""
    model = MODELS["deepseek-ai/DeepSeek-V3.2-Exp"]
    row = held("full", model, 100_000)
    assert row.device == 61 * 100_000 * 2 * (576 + 128)
    assert row.read == 61 * 2 * (2048 * 576 + 100_000 * 128)


ON = ("Llama-3.1-8B", "gemma-3-27b-it", "DeepSeek-V2-Lite", "Jamba-v0.1")


@pytest.mark.parametrize("method, model", [(one, ON[i % 4]) for i, one in enumerate(METHODS)])
def test_what_fits_is_what_just_fits(method, model):
    _, entry = data.model_named(model)
    bill = kvlab.bill(model, "B200", 4096, users=3, methods=[method])
    line, left = bill.lines[0], 179e9 - weights(entry)
    if line.refused or method == "recompute":
        return
    spec = parse(method)
    made = policies(spec)
    needs = lambda users, tokens: users * account(spec, made, entry, tokens).device
    assert needs(line.users, 4096) <= left < needs(line.users + 1, 4096)
    if line.tokens:
        assert needs(3, line.tokens) <= left
    if line.tokens < entry["context"]:
        assert needs(3, line.tokens + 1) > left
