"""Models of published shapes with random weights, made on the device; nothing is downloaded."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor

import kvlab
from kvlab.faster import graphed

SHAPES = {  # the publishers' configurations; OPT's positions go as far as the experiments need
    "Llama-3-8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    }),
    "OPT-13B": ("opt", {
        "hidden_size": 5120, "ffn_dim": 20480, "num_hidden_layers": 40, "num_attention_heads": 40,
        "word_embed_proj_dim": 5120, "vocab_size": 50272, "max_position_embeddings": 2304,
    }),
    "small-llama": ("llama", {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 1024,
    }),
    "small-opt": ("opt", {
        "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
        "word_embed_proj_dim": 128, "vocab_size": 512, "max_position_embeddings": 1024,
    }),
}  # fmt: skip
STD = 0.02  # of the weights
BYTES = 2  # of a weight


@cache
def published(name: str):
    """A model of a named shape without weights."""
    from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig

    family, shape = SHAPES[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config({"llama": LlamaConfig, "opt": OPTConfig}[family](**shape))


def weight_bytes(name: str) -> int:
    """Bytes of a named shape's weights in 16 bits."""
    return BYTES * sum(parameter.numel() for parameter in published(name).parameters())


def made(bench, name: str):
    """A model of a named shape with random weights, attending through kvlab; the last one made is kept."""
    if name not in bench.models:
        from transformers import AutoModelForCausalLM

        bench.models.clear()
        bench.tidy()
        torch.manual_seed(0)
        with torch.device(bench.device):  # made where it stays, buffers computed there
            model = AutoModelForCausalLM.from_config(published(name).config, dtype=torch.bfloat16)
        generator = torch.Generator(bench.device).manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, STD, generator=generator)
        bench.models[name, "hf"] = model.eval()
        bench.models[name] = kvlab.prepare(sharing(model))
    return bench.models[name]


def for_method(bench, name: str, method: str, way: str = "eager"):
    """The model for a method, always with the same weights: one that kvlab has never touched for
    transformers' caches, and a separate one for methods that add hooks, so that no other method's step pays
    for them, and for replayed steps (way: "graph")."""
    model = made(bench, name)
    if method.startswith("hf-"):
        return bench.models[name, "hf"]
    own = "infinigen" if method.startswith("infinigen") else way
    if own == "eager":
        return model
    if (name, own) not in bench.models:
        bench.models[name, own] = kvlab.prepare(sharing(bench.models[name, "hf"]))
        if own == "graph" and bench.on_gpu:
            graphed(bench.models[name, own])
    return bench.models[name, own]


def sharing(model):
    """A copy that shares the weights."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


def next_ids(bench, batch: int) -> Tensor:
    """One token for every row."""
    return torch.ones(batch, 1, dtype=torch.long, device=bench.device)
