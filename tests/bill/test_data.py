"""Models, devices and flags of the bill: their form, their sources, and what follows from them."""

import json

import pytest
from billed import MODELS
from described import described

from kvlab.bill.account import bytes_per_token


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_a_model_follow_from_its_configuration(name):
    assert json.loads(json.dumps(described(MODELS[name]))) == MODELS[name]


# 2 * layers * KV heads * head dimension * 2 bytes, written out: first token, and one beyond every window.
PER_TOKEN = {
    "facebook/opt-13b": (2 * 40 * 40 * 128 * 2,) * 2,
    "meta-llama/Llama-2-7b-hf": (2 * 32 * 32 * 128 * 2,) * 2,
    "meta-llama/Llama-3.1-8B": (2 * 32 * 8 * 128 * 2,) * 2,
    "meta-llama/Llama-3.1-70B": (2 * 80 * 8 * 128 * 2,) * 2,
    "meta-llama/Llama-3.2-1B": (2 * 16 * 8 * 64 * 2,) * 2,
    "HuggingFaceTB/SmolLM2-135M": (2 * 30 * 3 * 64 * 2,) * 2,
    "mistralai/Mistral-7B-v0.1": (2 * 32 * 8 * 128 * 2, 0),  # a window of 4,096 in every layer
    "mistralai/Mixtral-8x7B-v0.1": (2 * 32 * 8 * 128 * 2,) * 2,
    "Qwen/Qwen2.5-7B": (2 * 28 * 4 * 128 * 2,) * 2,
    "Qwen/Qwen3-8B": (2 * 36 * 8 * 128 * 2,) * 2,
    "Qwen/Qwen3-30B-A3B": (2 * 48 * 4 * 128 * 2,) * 2,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (2 * 12 * 2 * 256 * 2,) * 2,  # one layer in four
    "google/gemma-3-27b-it": (2 * 62 * 16 * 128 * 2, 2 * 10 * 16 * 128 * 2),  # every sixth sees all
    "google/gemma-3n-E4B": (2 * 20 * 2 * 256 * 2, 2 * 4 * 2 * 256 * 2),  # 15 of 35 share
    "openai/gpt-oss-20b": (2 * 24 * 8 * 64 * 2, 2 * 12 * 8 * 64 * 2),  # every other sees all
    "meta-llama/Llama-4-Scout-17B-16E": (2 * 48 * 8 * 128 * 2, 2 * 12 * 8 * 128 * 2),  # chunks of 8,192
    "deepseek-ai/DeepSeek-V2-Lite": (27 * (512 + 64) * 2,) * 2,  # a latent and a rotary part
    "deepseek-ai/DeepSeek-V3.2-Exp": (61 * (512 + 64 + 128) * 2,) * 2,  # and an index key
    "ai21labs/Jamba-v0.1": (2 * 4 * 8 * 128 * 2,) * 2,  # one layer in eight
    "tiiuae/falcon-7b": (2 * 32 * 1 * 64 * 2,) * 2,
}


@pytest.mark.parametrize("name", MODELS)
def test_bytes_per_token(name):
    model = MODELS[name]
    assert (bytes_per_token(model, 1), bytes_per_token(model, model["context"])) == PER_TOKEN[name]
