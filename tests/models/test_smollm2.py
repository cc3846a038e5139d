"""SmolLM2-135M-Instruct as it was converted: what is known of it, its tokens, its perplexity, its answers.

When this was written, the converted model was compared with a forward pass written down from the GGUF file's
own tensors in llama.cpp's conventions: log-probabilities equal within 6e-5, and the loss below to all digits.
tests/models/test_gguf.py holds the conversion itself against small files.
"""

import pytest
import torch
from torch.nn.functional import cross_entropy

import kvlab
from course.teaching.smollm2 import stored
from eval.core.digests import model_digest
from eval.tasks.rows import prose
from kvlab.models import ModelShape


def test_its_shape_and_configuration(smollm2):
    """Of the model card and of the file: 30 layers, 9 heads, 3 KV heads of 64, 134,515,008 parameters."""
    model, tokenizer = smollm2
    shape = ModelShape(30, 576, 9, 3, vocabulary=49152, head_dim=64, context=8192)
    assert ModelShape.of(model) == shape
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.config.rope_parameters == {"rope_theta": 100_000.0, "rope_type": "default"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert model.generation_config.eos_token_id == 2
    assert len(tokenizer) == 49152 and tokenizer.model_max_length == 8192


def test_the_numbers_that_chapters_show_are_of_this_model(smollm2):
    """By the contents of its files."""
    assert model_digest("smollm2") == stored()["digest"]


TOKENS = {
    "The capital of France is": [504, 3575, 282, 4649, 314],  # no <|im_start|> in front
    "Hello 2024 world": [19556, 216, 34, 32, 34, 36, 905],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
}


@pytest.mark.parametrize("text", TOKENS)
def test_known_tokens(smollm2, text):
    assert smollm2[1](text).input_ids == TOKENS[text]


@pytest.mark.parametrize("dtype, near", [("float32", 2e-4), ("bfloat16", 0.02)])
def test_perplexity_of_a_story_of_ours(smollm2, dtype, near):
    """Through the cache that holds everything, in fp32 and in bf16."""
    model, tokenizer = smollm2 if dtype == "float32" else kvlab.load("smollm2", device="cpu", dtype=dtype)
    ids = tokenizer(prose()["test"][0]["text"], return_tensors="pt").input_ids[:, :160]
    stepper = kvlab.Stepper(model, kvlab.make_cache(model, "full"))
    logits = torch.cat([stepper.feed(ids[:, :150]), stepper.feed(ids[:, 150:])], 1)
    loss = cross_entropy(logits[0, :-1].float(), ids[0, 1:]).item()
    assert loss == pytest.approx(3.0491, abs=near)  # nats per token: perplexity 21.1
