"""`full` through `model.generate` is transformers' own `generate`, over 200 greedy tokens."""

import pytest
import torch
from tiny import left_padded, prompt, tiny
from transformers import AutoModelForCausalLM

import kvlab
from kvlab.models.loading import EMBEDDED

TOKENS = 200


def generated(model, ids, mask, **cache):
    """(tokens made, their logits) `[batch, TOKENS]`, `[batch, TOKENS, V]`."""
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        return_dict_in_generate=True, output_logits=True, **cache,
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def equal(mine, theirs, ids, mask) -> None:
    expected, logits = generated(theirs, ids, mask)
    tokens, found = generated(mine, ids, mask, past_key_values=kvlab.make_cache(mine, "full"))
    assert expected.shape == (len(ids), TOKENS)
    assert torch.equal(tokens, expected)
    assert torch.allclose(found.log_softmax(-1), logits.log_softmax(-1), atol=1e-4)


@pytest.mark.parametrize("family", ["phi", "gpt2"])
def test_tiny_models(family):
    """A left-padded batch of three rows, the longest of 30 tokens."""
    size = {"max_position_embeddings": 256}
    ids, mask = left_padded([prompt(tokens, seed=tokens) for tokens in (17, 5, 30)])
    equal(tiny(family, **size), tiny(family, "sdpa", **size), ids, mask)


@pytest.mark.parametrize("name", EMBEDDED)
def test_workshop_models(name):
    """English, two rows of different lengths."""
    mine, tokenizer = kvlab.load(name)
    theirs = AutoModelForCausalLM.from_pretrained(EMBEDDED[name], dtype=torch.float32).eval()
    texts = ["Once upon a time there was a small boat", "The brown dog slept by"]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    equal(mine, theirs, encoded.input_ids, encoded.attention_mask)
