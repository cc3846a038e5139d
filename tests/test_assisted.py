"""Assisted decoding takes tokens back: transformers' own tokens, or a refusal before the first one."""

import pytest
import torch
from every import EVERY, make
from families.models import family
from tiny import prompt, tiny

import kvlab

HOW = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}


def repeating(tokens=30):
    ids = prompt(tokens)
    ids[0, 18:28] = ids[0, 3:13]
    return ids


WAYS = [*((spec, "prompt lookup") for spec in EVERY), *((spec, "assistant") for spec in EVERY[::7])]


@pytest.mark.parametrize("spec, how", WAYS)
def test_the_same_tokens_or_a_refusal(spec, how):
    model, ids = tiny("llama"), repeating()
    helped = {"prompt_lookup_num_tokens": 4}
    if how == "assistant":
        helped = {"assistant_model": tiny("llama", "sdpa", num_hidden_layers=1)}
    cache = make(model, spec)
    try:
        out = model.generate(ids, past_key_values=cache, **helped, **HOW)
    except ValueError as error:
        assert str(error).startswith("assisted decoding takes tokens back, and ") and "\n" not in str(error)
        assert cache.get_seq_length() == 0
        return
    assert torch.equal(out, model.generate(ids, past_key_values=make(model, spec), **HOW))
    assert not cache.layers[0].evicts


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3", "Llama 4", "Qwen3-Next", "LFM2"])
def test_windows_and_states_are_refused_before_the_first_token(name):
    model = kvlab.prepare(family(name))
    for spec in ("full", "h2o:budget=300"):
        cache = kvlab.make_cache(model, spec)
        with pytest.raises(ValueError, match=r"^assisted .* is not supported|^assisted decoding takes"):
            model.generate(repeating(), past_key_values=cache, prompt_lookup_num_tokens=4, **HOW)
        assert cache.get_seq_length() == 0


@pytest.mark.parametrize("spec", ["full", "static", "offload"])
def test_a_later_turn_is_refused(spec):
    """transformers feeds the whole text there, on top of what is held: its own caches answer another text."""
    model = tiny("llama")
    cache = make(model, spec)
    ids = model.generate(repeating(), past_key_values=cache, **HOW)
    held = cache.get_seq_length()
    with pytest.raises(ValueError, match=f"^assisted decoding .* this cache holds {held} tokens"):
        model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **HOW)
    assert cache.get_seq_length() == held
