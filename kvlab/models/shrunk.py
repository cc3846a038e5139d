"""Shrunk: a tiny random model of the same configuration class, which behaves like the large one."""

from __future__ import annotations

import copy

import torch

from ..errors import kind_and_line
from .passes import cache_name

PROMPT, TOLERANCE = 20, 1e-3  # of the logits' standard deviation; what is wrong is off by far more
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
    "n_mamba_heads": 6, "mamba_headdim": 32, "attention_hidden_size": 192, "attention_head_dim": 32,
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
    small = {name: size for name, size in SMALL.items() if given.get(name)}  # of what it has none, none
    for name, size in small.items():
        if isinstance(given[name], list) and not isinstance(size, list):  # a size for each layer
            small[name] = [size] * LAYERS
    heads, all_heads = given.get("num_key_value_heads"), given.get("num_attention_heads")
    if "num_key_value_heads" in given:
        small["num_key_value_heads"] = 6 if heads in (None, all_heads) else min(heads, 3)
    if "head_dim" in given:
        small["head_dim"] = small.get("qk_rope_head_dim") or _rotated_evenly(given)
    if given.get("qk_head_dim") and given.get("qk_rope_head_dim"):
        small["qk_head_dim"] = SMALL["qk_nope_head_dim"] + SMALL["qk_rope_head_dim"]
    if given.get("n_routed_experts"):
        small["num_experts_per_tok"] = SMALL["num_experts_per_tok"]
    if given.get("num_experts_per_tok") == 1:  # some can do no more
        small["num_experts_per_tok"] = 1
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
    taken = _some(kinds) if len(kinds) == depth else [index % depth for index in range(LAYERS)]
    found = {}
    for name, value in given.items():
        if isinstance(value, list) and len(value) == depth and (name in KINDS or depth > LAYERS):
            found[name] = [value[index] for index in taken]
        elif name == "hybrid_layer_ids":
            found[name] = [place for place, index in enumerate(taken) if index in value]
        elif name == "per_layer_config" and isinstance(value, dict):
            said = {int(index): one for index, one in value.items()}
            found[name] = {place: said[index] for place, index in enumerate(taken) if index in said}
    return found


def _rotated_evenly(given: dict) -> int:
    """A head dimension whose rotated part is even, as it is in the large model."""
    rope = given.get("rope_parameters") or {}
    said = [one for one in (given, rope, *rope.values()) if isinstance(one, dict)]
    factors = [one["partial_rotary_factor"] for one in said if one.get("partial_rotary_factor")]
    sizes = range(SMALL["head_dim"], 4 * SMALL["head_dim"], 4)
    return next(size for size in sizes if all(int(size * factor) % 2 == 0 for factor in factors))


def _fewer_frequencies(rope: dict, share: float) -> dict:
    """Of a list with an entry for each frequency, that share of its entries, or its last one once more."""
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):  # one for each kind of layer
            value = _fewer_frequencies(value, share)
        elif isinstance(value, list):
            count = max(1, round(len(value) * share))
            value = (value + value[-1:] * count)[:count]
        small[name] = value
    return small


def _some(kinds: list) -> list[int]:
    """Where four of a list are, the kinds in it taking turns, in the order in which they come."""
    places: dict = {}
    for index, kind in enumerate(kinds):
        places.setdefault(kind, []).append(index)
    turns = zip(*(where * LAYERS for where in places.values()), strict=False)
    return [index for turn in turns for index in turn][:LAYERS]


def twin_of(config):
    """A random model of the shrunk configuration that attends by itself. Whatever transformers raises."""
    from transformers import AutoModelForCausalLM

    small = shrunk(config)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(small).parameters())
    if size > LARGEST:
        raise ValueError(f"shrunk, it still has {size:,} parameters")
    return random_model(small, 0)


def random_model(config, seed: int):
    """A model that attends by itself; its matrices make logits spread by about 1.3, and no bias is zero."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        for weight in made.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 1.3 / weight.shape[-1] ** 0.5)
            elif weight.numel() > 1:
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    return made


def once(found: dict, config, find):
    """`find(config)`, once for all configurations that differ only in their sizes; a text if it could not be
    tried."""
    try:
        key = repr((type(config), sorted(shrunk(config).to_dict().items(), key=str)))
        if key not in found:
            found[key] = find(config)
        return found[key]
    except Exception as error:
        return f"it could not be tried ({kind_and_line(error)})"


_forgetful: dict[str, bool | str] = {}  # small configuration -> whether it forgets, or why that is unknown


def forgets(model) -> bool:
    """Whether the model's states forget the text at a later pass of several tokens, in transformers' own
    cache too: tried on a twin, once."""
    return once(_forgetful, model.config.get_text_config(decoder=True), _forgets) is not False


@torch.no_grad()
def _forgets(config) -> bool:
    from transformers import DynamicCache

    own = twin_of(config)
    ids = torch.randint(2, 96, (1, PROMPT), generator=torch.Generator().manual_seed(1), device="cpu")
    whole, cache, half = own(ids, use_cache=False).logits, DynamicCache(config=own.config), PROMPT // 2
    given = {cache_name(own): cache}
    pieces = [own(part, **given).logits for part in (ids[:, :half], ids[:, half:])]
    return bool((torch.cat(pieces, 1) - whole).abs().max() > TOLERANCE * whole.std())
