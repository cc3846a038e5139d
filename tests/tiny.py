"""Tiny random models of every family, made in milliseconds, and ways to run them."""

import functools
from types import SimpleNamespace

import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import kvlab
from kvlab.models import ModelShape

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,  # a pad token has a zero embedding, so every score ties
}
GQA = {"num_key_value_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, GQA),
    "mistral": (MistralForCausalLM, MistralConfig, GQA | {"head_dim": 8, "sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GQA),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GQA | {"head_dim": 16}),
    "phi": (PhiForCausalLM, PhiConfig, {"intermediate_size": 48, "num_key_value_heads": 4}),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, {"intermediate_size": 48}),
}


@functools.cache
def tiny(family: str, attention: str = "kvlab", dtype: torch.dtype = torch.float32, **changes):
    """A seeded random model; the same family gives the same weights whatever the attention."""
    make, config, own = FAMILIES[family]
    torch.manual_seed(7)
    model = make(config(**(COMMON | own | changes))).to(dtype).eval()
    if attention == "kvlab":
        return kvlab.prepare(model)
    model.set_attn_implementation(attention)
    return model


@functools.cache
def falcon():
    """A family that does not use the attention interface."""
    return FalconForCausalLM(
        FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    )


def prompt(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


def left_padded(prompts: list[torch.Tensor]):
    """Prompts `[1, tokens]` of different lengths -> (ids, mask), padded on the left."""
    longest = max(ids.shape[1] for ids in prompts)
    ids = torch.ones(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, one in enumerate(prompts):
        ids[row, longest - one.shape[1] :] = one
        mask[row, longest - one.shape[1] :] = 1
    return ids, mask


def linked(spec: str, bandwidth="1e9") -> str:
    """A method's name with a link of so many bytes per second."""
    return f"{spec}{',' if ':' in spec else ':'}link={bandwidth}"


def started(policy, head_dim: int = 8, kv_heads: int = 2, context: int | None = None):
    """The state of a keep, store or place for the only layer of a model that is not there."""
    shape = ModelShape(1, kv_heads * head_dim, kv_heads, kv_heads, 96, head_dim, context)
    about = {"index": 0, "order": 0, "local": None, "model": None, "evicts": False}
    return policy.start(SimpleNamespace(kv_heads=kv_heads, shape=shape, **about))
