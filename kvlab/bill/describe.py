"""Describe: the cached numbers of every layer and the reads of a model's weights, by transformers' own code.

The model is made without memory (torch's meta device) and fed two tokens; its cache then holds the tensors
that transformers would allocate: grouped and shared heads, windows, latents, index keys, states.
"""

from __future__ import annotations

import copy
import re

import torch

from ..errors import first_line
from ..models.passes import cache_name

# How it computes does not matter here; these forms need no numbers.
OPTIONS = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}


def describe(config, bits: dict[str, float] | None = None) -> dict:
    """A model's entry in `models.json`, without its configuration and sources.

    config: a transformers configuration. bits: of the released weights, by part (default: 16 each).
    Returns context (tokens, or None), layers (a letter for every layer), kinds (of each letter: see `_kind`),
    weights (rows of part, parameters, bits, and when it is read, see `_weights`) and experts ([how many of
    them a layer has, how many a token takes], or None). ValueError where transformers cannot make it.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    text = copy.deepcopy(config.get_text_config(decoder=True))  # OPTIONS are written into what makes a model
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16, **OPTIONS)
            ids = torch.zeros(1, 2, dtype=torch.long, device="cpu")
        cache = DynamicCache(config=text)
        with torch.no_grad():
            model.eval()(ids, **{cache_name(model): cache}, use_cache=True)
    except Exception as error:
        why = f"transformers makes no cache for this model ({first_line(error)})"
        raise ValueError(f"{text.model_type}: {why}") from error
    letters: dict[tuple, str] = {}
    layers = ""
    shares = _shares(text)
    for index in range(len(cache.layers)):
        source = shares.get(index)
        kind = _kind(cache.layers[index if source is None else source], text)
        if source is not None:
            kind |= {"heads": 0, "shares": layers[source]}
        layers += letters.setdefault(tuple(kind.items()), chr(ord("A") + len(letters)))
    weights, experts = _weights(model, bits or {})
    return {
        "context": getattr(text, "max_position_embeddings", None),
        "layers": layers,
        "kinds": {letter: dict(kind) for kind, letter in letters.items()},
        "weights": weights,
        "experts": experts,
    }


def _kind(layer, config) -> dict:
    """A layer of a DynamicCache that has taken two tokens.

    heads: KV heads that are cached, of key and value numbers each (0: nothing grows here). latent: K and V
    are made of what is cached (MLA). window: most tokens that a query sees (None: all). reads: most tokens
    whose K and V a query reads of those it sees (None: all). index: numbers of an index key per token.
    state: bytes per row, however long. scores: multiply-adds of the prefill for a query and a key, over all
    heads; index_scores: those of the index. shares: the letter whose K and V this layer reads (None: its
    own).
    """
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    there = keys is not None and keys.numel() > 0
    index = getattr(layer, "indexer_keys", None)
    latent = getattr(config, "kv_lora_rank", None) if there else None
    wide = keys.shape[-1] + values.shape[-1] if there else 0
    if latent:
        wide = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    return {
        "heads": keys.shape[1] if there else 0,
        "key": keys.shape[-1] if there else 0,
        "value": values.shape[-1] if there else 0,
        "latent": bool(latent) and keys.shape[1] == 1,
        "window": getattr(layer, "sliding_window", None),
        "reads": getattr(config, "index_topk", None) if index is not None else None,
        "index": 0 if index is None else index.shape[-1],
        "state": sum(state.numel() * state.element_size() for state in states if state is not None),
        "scores": config.num_attention_heads * wide,
        "index_scores": 0 if index is None else config.index_n_heads * index.shape[-1],
        "shares": None,
    }


def _shares(config) -> dict[int, int]:
    """{layer: the layer whose K and V it reads}. The last `num_kv_shared_layers` layers read those of the
    last layer before them that is of their own type."""
    count, types = getattr(config, "num_kv_shared_layers", 0) or 0, getattr(config, "layer_types", None)
    first = config.num_hidden_layers - count
    return {
        index: max(i for i in range(first) if types[i] == types[index])
        for index in range(first, config.num_hidden_layers)
    }


def _weights(model, bits: dict[str, float]) -> tuple[list, list[int] | None]:
    """Rows [part, parameters, bits each, when it is read].

    "row": one row per token (embeddings). "head": once a step, for the last token of a prompt. "step": once a
    step, for every token of a prompt. "experts": of each layer's experts those that a token takes.
    """
    head = model.get_output_embeddings().weight
    rows = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)} - {id(head)}
    parts, experts = {"row": 0, "head": 0, "step": 0, "experts": 0}, 0
    for name, weight in model.named_parameters():  # tied ones once
        if re.search(r"\.experts\.", name):
            when, experts = "experts", max(experts, weight.shape[0])
        else:
            when = "head" if weight is head else "row" if id(weight) in rows else "step"
        parts[when] += weight.numel()
    names = {"row": "embedding", "head": "head", "step": "blocks", "experts": "experts"}
    weights = [
        [names[when], count, bits.get(names[when], 16), when] for when, count in parts.items() if count
    ]
    taken = getattr(model.config, "num_experts_per_tok", None)
    return weights, [experts, taken] if experts else None
