"""Twin: a tiny random model of the same configuration class, on which every method is tried against the
model's own attention and cache."""

from __future__ import annotations

import copy
import functools

import torch

from .cache import KVCache
from .models import prepare, refusal

# Model types that tests/families tries with every method; others are tried when a cache is made for them.
LISTED = frozenset((
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi", "phi3", "gemma2", "gemma3_text",
    "olmo2", "smollm3", "glm4", "cohere2", "stablelm", "granite", "gpt_oss", "opt", "gpt2", "gpt_neox",
    "llama4_text", "qwen3_next", "lfm2", "granitemoehybrid", "jamba", "falcon_h1", "deepseek_v2",
    "deepseek_v3",
))  # fmt: skip
PROMPT, STEPS = 20, 5
TOLERANCE = 1e-3  # of the logits' standard deviation; a wrong token or mask is off by far more
LAYERS, LARGEST = 4, 20_000_000
SMALL = {  # what shrinks, where a configuration has it
    "hidden_size": 96, "n_embd": 96, "d_model": 96, "head_dim": 16, "num_attention_heads": 6, "n_head": 6,
    "intermediate_size": 40, "ffn_dim": 40, "n_inner": 40, "block_ff_dim": 40, "intermediate_size_mlp": 40,
    "moe_intermediate_size": 20, "shared_intermediate_size": 20, "shared_expert_intermediate_size": 20,
    "word_embed_proj_dim": 96, "vocab_size": 96, "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8, "sliding_window": 7, "attention_chunk_size": 5,
    "attention_window_size": 7, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "kv_lora_rank": 12,
    "q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "first_k_dense_replace": 1, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_d_state": 8, "mamba_n_heads": 6,
    "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_d_ssm": 192, "mamba_dt_rank": 5,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "attn_layer_indices": [1], "lru_width": 96, "block_size": 8, "num_kv_shared_layers": 2,
    "altup_num_inputs": 2, "laurel_rank": 4, "max_position_embeddings": 128, "n_positions": 128,
}  # fmt: skip


def shrunk(config):
    """The configuration made small: window 7, chunk 5, four layers that show every kind there is."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    given = config.to_dict()
    small = {name: size for name, size in SMALL.items() if given.get(name) is not None}
    for name in ("intermediate_size", "activation_sparsity_pattern"):
        if isinstance(given.get(name), list):
            small[name] = [small.get(name, 0.0)] * LAYERS
    heads = given.get("num_key_value_heads")
    if heads is not None:
        small["num_key_value_heads"] = 6 if heads == given.get("num_attention_heads") else min(heads, 2)
    for name in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        if isinstance(given.get(name), list):
            small[name] = _some(given[name])
    for name in ("num_hidden_layers", "n_layer"):
        if given.get(name) is not None:
            small[name] = LAYERS
    for name in ("pad_token_id", "eos_token_id"):
        small[name] = None
    small["bos_token_id"] = 0
    return type(config).from_dict(given | small)


def _some(kinds: list) -> list:
    """Four of a list, in order, with every kind that is in it."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())[:LAYERS]
    rest = [index for index in range(len(kinds)) if index not in chosen]
    chosen = sorted([*chosen, *rest][:LAYERS])
    return [kinds[index] for index in (chosen * LAYERS)[:LAYERS]]


def twin_of(config, seed: int = 0):
    """A random model of the shrunk configuration that attends by itself. Whatever transformers raises."""
    from transformers import AutoModelForCausalLM

    small = shrunk(config)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(small).parameters())
    if size > LARGEST:
        raise ValueError(f"shrunk, it still has {size:,} parameters")
    return random_model(small, seed)


def random_model(config, seed: int):
    """A model that attends by itself; its matrices make logits spread by about 1.3, and no bias is zero."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.3 / weight.shape[-1] ** 0.5)
            elif weight.numel() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return made


@torch.no_grad()
def outputs(model, cache=None, steps: int = STEPS) -> torch.Tensor:
    """Logits of a prompt and some steps `[1, tokens, vocabulary]`, through this cache, or the model's own."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 96, (1, PROMPT + steps), generator=generator)
    found = []
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + steps))]:
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = getattr(out, "past_key_values", None) if cache is None else cache
        if cache is None:
            raise ValueError("it returns no cache")
        found.append(out.logits.float())
    return torch.cat(found, 1)


def differs(config, make=KVCache) -> str | None:
    """Why a cache by `make(model)` is not equal to the model's own on a twin, or None where it is."""
    try:
        own = twin_of(config)
        expected = outputs(own)
    except Exception as error:
        return f"no tiny model of it runs with a cache of its own ({_first_line(error)})"
    try:
        ours = prepare(copy.deepcopy(own))
        cache = make(ours)
    except ValueError as error:
        return str(error)
    try:
        found = outputs(ours, cache)
    except Exception as error:
        return f"it does something of its own with K and V ({_first_line(error)})"
    off = float((found - expected).abs().max() / expected.std())
    return None if off < TOLERANCE else f"it does something of its own with K and V (off by {off:.2g})"


SPECS = {  # method -> the setting at which it gives nothing up
    "full": "full",
    "recompute": "recompute",
    "static": "static:length=80",
    "paged": "paged:block=7",
    "int8": "int8:sinks=80",
    "int4": "int4:sinks=80",
    "int2": "int2:sinks=80",
    "kivi2": "kivi2:recent=80",
    "kivi4": "kivi4:recent=80",
    "sinks": "sinks:budget=1",
    "h2o": "h2o:budget=1",
    "snapkv": "snapkv:budget=1",
    "tova": "tova:budget=1",
    "pyramidkv": "pyramidkv:budget=1",
    "keydiff": "keydiff:budget=1",
    "keynorm": "keynorm:budget=1",
    "random": "random:budget=1",
    "offload": "offload",
    "offload+h2o": "offload+h2o:budget=1",
    "uvm": "uvm",
    "uvm+h2o": "uvm+h2o:budget=1,memory=1",
    "topk": "topk:budget=1",
    "infinigen": "infinigen:budget=1,alpha=inf,ratio=1,full_layers=1",
}


def row(config, make_cache) -> dict[str, str]:
    """{method: "equal", or why not}, each made by `make_cache(model, spec)` for a twin of this configuration.

    ValueError, one line, for a model that no method can serve.
    """
    twin = prepare(twin_of(config))
    if why := refusal(twin) or differs(config):
        raise ValueError(f"{type(twin).__name__}: {why}")
    found = {}
    for name, spec in SPECS.items():
        if name != "recompute":
            found[name] = differs(config, lambda model, spec=spec: make_cache(model, spec)) or "equal"
    return found


def check(model) -> None:
    """ValueError for a model that kvlab's caches cannot serve; one line that says why. A type that is not
    listed is tried on a twin, once."""
    if why := refusal(model):
        raise ValueError(f"{type(model).__name__}: {why}")
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in LISTED:
        known = _tried(type(config), tuple(getattr(config, "layer_types", None) or ()), _Same(config))
        if known:
            raise ValueError(f"{type(model).__name__}: {known}")


class _Same:
    """A configuration that a cache of results does not look at."""

    def __init__(self, config):
        self.config = config

    def __eq__(self, other) -> bool:
        return isinstance(other, _Same)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _tried(kind, layer_types, config: _Same) -> str | None:
    return differs(config.config)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
