"""Twin: a tiny random model of the same configuration class, on which every method is tried against the
model's own attention and cache."""

from __future__ import annotations

import copy

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
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")
KINDS = ("layer_types", "layers_block_type", "no_rope_layers", "mlp_layer_types")
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
    "num_experts_per_token": 2, "moe_topk": 2, "zero_expert_num": 2, "ffn_hidden_size": 40,
    "expert_ffn_hidden_size": 20, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 2,
    "altup_num_inputs": 2, "laurel_rank": 4, "max_position_embeddings": 128, "n_positions": 128,
}  # fmt: skip


def shrunk(config):
    """The configuration made small: window 7, chunk 5, four layers that show every kind there is."""
    config = copy.deepcopy(config.get_text_config(decoder=True))
    given = config.to_dict()
    depth = next((given[name] for name in DEPTHS if given.get(name)), LAYERS)
    given |= _some_layers(given, depth) | {name: LAYERS for name in DEPTHS if given.get(name)}
    small = {name: size for name, size in SMALL.items() if given.get(name) is not None}
    for name, size in small.items():
        if isinstance(given[name], list) and not isinstance(size, list):  # a size for each layer
            small[name] = [size] * LAYERS
    heads, all_heads = given.get("num_key_value_heads"), given.get("num_attention_heads")
    if "num_key_value_heads" in given:
        small["num_key_value_heads"] = 6 if heads in (None, all_heads) else min(heads, 2)
    if "head_dim" in given:
        small["head_dim"] = small.get("qk_rope_head_dim", SMALL["head_dim"])
    if given.get("n_routed_experts"):
        small["num_experts_per_tok"] = SMALL["num_experts_per_tok"]
    for name, token in {"pad_token_id": 1, "eos_token_id": 1, "bos_token_id": 0}.items():
        if given.get(name) is not None:
            small[name] = token
    rotated = given.get("qk_rope_head_dim") or given.get("head_dim")
    rotated = rotated or (given["hidden_size"] // all_heads if all_heads and given.get("hidden_size") else 0)
    if rotated and isinstance(given.get("rope_parameters"), dict):
        now = small.get("qk_rope_head_dim", SMALL["head_dim"])
        small["rope_parameters"] = _fewer_frequencies(given["rope_parameters"], now / rotated)
    return type(config).from_dict(given | small)


def _some_layers(given: dict, depth: int) -> dict:
    """What a configuration says layer by layer, for the layers that the small one takes."""
    kinds = next((given[name] for name in KINDS if isinstance(given.get(name), list)), [])
    taken = _some(kinds) if len(kinds) == depth else list(range(LAYERS))
    found = {}
    for name, value in given.items():
        if isinstance(value, list) and len(value) == depth > LAYERS:
            found[name] = [value[index] for index in taken]
        elif name == "per_layer_config" and isinstance(value, dict):
            said = {int(index): one for index, one in value.items()}
            found[name] = {place: said[index] for place, index in enumerate(taken) if index in said}
    return found


def _fewer_frequencies(rope: dict, share: float) -> dict:
    """Of a list with an entry for each frequency, that share of its entries."""
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # one for each kind of layer
            value = _fewer_frequencies(value, share)
        elif isinstance(value, list):
            value = value[: max(1, round(len(value) * share))]
        small[name] = value
    return small


def _some(kinds: list) -> list[int]:
    """Where four of a list are, in order, every kind that is in it among them."""
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    chosen = sorted(first.values())[:LAYERS]
    rest = [index for index in range(len(kinds)) if index not in chosen]
    chosen = sorted([*chosen, *rest][:LAYERS])
    return (chosen * LAYERS)[:LAYERS]


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

    with torch.random.fork_rng(devices=[]):
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
def outputs(model, cache=None, steps: int = STEPS) -> torch.Tensor | None:
    """Logits of a prompt and some steps `[1, tokens, vocabulary]`, through this cache, or the model's own;
    None where it has none."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 96, (1, PROMPT + steps), generator=generator)
    found = []
    for start, end in [(0, PROMPT), *((at, at + 1) for at in range(PROMPT, PROMPT + steps))]:
        out = model(ids[:, start:end], past_key_values=cache, use_cache=True)
        cache = getattr(out, "past_key_values", None) if cache is None else cache
        if cache is None:
            return None
        found.append(out.logits.float())
    return torch.cat(found, 1)


def differs(config, make=KVCache) -> str | None:
    """Why a cache by `make(model)` is not equal to the model's own on a twin, or None where it is."""
    try:
        own = twin_of(config)
        if why := refusal(own):
            return why
        expected = outputs(own)
    except Exception as error:
        return f"it could not be tried: no tiny model of its class runs ({_first_line(error)})"
    if expected is None:
        return "it does something of its own with K and V (it returns no cache)"
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
    if config.model_type not in LISTED and (why := _tried(config)):
        raise ValueError(f"{type(model).__name__}: {why}")


_found: dict[str, str | None] = {}  # small configuration -> why it is refused, or None


def _tried(config) -> str | None:
    """`differs`, once for all configurations that are the same but for their sizes."""
    try:
        key = repr((type(config), sorted(shrunk(config).to_dict().items(), key=str)))
    except Exception as error:
        return f"it could not be tried: its configuration cannot be made small ({_first_line(error)})"
    if key not in _found:
        _found[key] = differs(config)
    return _found[key]


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
