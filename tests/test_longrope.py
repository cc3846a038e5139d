"""Models that rotate a long text otherwise (longrope): one side of the switch, or a refusal before it."""

import pytest
import torch
from tiny import left_padded, prompt
from transformers import AutoModelForCausalLM, Phi3Config, PhimoeConfig

import kvlab

SWITCH = 32
HOW = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4,
        "original_max_position_embeddings": SWITCH, "short_mscale": 1.0, "long_mscale": 1.2}  # fmt: skip


def model_of(kind):
    torch.manual_seed(0)
    config = kind(
        vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=96, pad_token_id=0, bos_token_id=1, eos_token_id=None,
        original_max_position_embeddings=SWITCH, rope_parameters=dict(ROPE), initializer_range=0.2,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("kind", [Phi3Config, PhimoeConfig])
@pytest.mark.parametrize("tokens", [25, 33])
def test_generate_uses_the_cache_on_either_side(kind, tokens):
    model, ids = model_of(kind), prompt(tokens)
    expected = model.generate(ids, **HOW)
    cache = kvlab.make_cache(model, "full")
    assert torch.equal(model.generate(ids, past_key_values=cache, **HOW), expected)
    assert cache.stats().tokens_seen == tokens + 7
    for spec in ("h2o:budget=6", "snapkv:budget=6,window=3", "int4:group=4"):
        cache = kvlab.make_cache(model, spec)
        found = model.generate(ids, past_key_values=cache, **HOW)[:, tokens:]
        assert torch.equal(found, kvlab.decode(model, ids, kvlab.make_cache(model, spec), 8).tokens)
        assert cache.stats().tokens_seen == tokens + 7


@pytest.mark.parametrize("kind", [Phi3Config, PhimoeConfig])
@pytest.mark.parametrize("spec", ["full", "h2o:budget=6", "int2:group=4"])
def test_the_token_that_would_cross_is_refused(kind, spec):
    model, cache = model_of(kind), None
    for go_on in ("generate", "decode", "harness"):
        cache = kvlab.make_cache(model, spec)
        with pytest.raises(
            ValueError, match=f"more than {SWITCH} tokens otherwise .longrope., and what is c"
        ):
            if go_on == "generate":
                model.generate(prompt(28), past_key_values=cache, **HOW)
            elif go_on == "decode":
                kvlab.decode(model, prompt(28), cache, 8)
            else:
                with torch.no_grad():
                    model(prompt(SWITCH), past_key_values=cache)
                    model(prompt(4), past_key_values=cache)
        assert cache.get_seq_length() == SWITCH and cache.stats().tokens_seen == SWITCH
    cache.reset()
    kvlab.Stepper(model, cache).feed(prompt(40))


def test_rows_on_both_sides_are_refused():
    model = model_of(Phi3Config)
    ids, mask = left_padded([prompt(40), prompt(20, seed=1)])
    cache = kvlab.make_cache(model, "full")
    with pytest.raises(ValueError, match="the rows of this batch end at 20 to 40: feed those apart"):
        kvlab.Stepper(model, cache).feed(ids, mask)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="the rows of this batch end at 32 to 33: feed those apart"):
        ids, mask = left_padded([prompt(30), prompt(29, seed=1)])
        kvlab.decode(model, ids, kvlab.make_cache(model, "recompute"), 9, mask)  # no row alone would do so


def test_a_static_graph_is_refused_where_it_would_cross():
    model = model_of(Phi3Config)
    with pytest.raises(
        ValueError, match=r"tokens otherwise .longrope., and a static graph rotates all texts"
    ):
        kvlab.decode(model, prompt(28), kvlab.make_cache(model, "padded:length=60,chunk=1"), 8)
    for chunk in (None, 8):
        stepper = kvlab.Stepper(model, kvlab.make_cache(model, "padded:length=60,chunk=1"))
        with pytest.raises(ValueError, match="a static graph rotates all texts in one way"):
            stepper.feed(prompt(40), chunk=chunk)
