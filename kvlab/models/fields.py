"""Fields: what a GGUF file says of its model. transformers reads some of it, and else takes its defaults."""

from __future__ import annotations

from ..errors import shown

# what `ARCHITECTURE.` is followed by, and the names that configurations have for it
NAMES = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_kv_heads", "num_key_value_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "context_length": ("n_positions",),
    "feed_forward_length": ("n_inner",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "use_parallel_residual": ("use_parallel_residual",),
}
LOCAL = ("sliding_attention",)
NONE_AT_0 = ("attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
ROTATIONS = {"rope.freq_base": "full_attention", "rope.freq_base_swa": "sliding_attention"}
# these change no number, are looked at elsewhere, or have no place in some configurations: sizes are those of
# the tensors, positions are in gguf.py
ELSEWHERE = (
    "attention.key_length", "attention.value_length", "block_count", "context_length", "embedding_length",
    "expert_count", "expert_feed_forward_length", "expert_shared_feed_forward_length", "feed_forward_length",
    "full_attention_interval", "nextn_predict_layers", "pooling_type", "rope.dimension_count",
    "rope.dimension_sections", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.finetuned",
    "rope.scaling.original_context_length", "rope.scaling.type", "shortconv.l_cache", "ssm.conv_kernel",
    "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "tensor_data_layout",
    "vocab_size",
)  # fmt: skip
WINDOWS = {"gemma2": 4096, "gemma3_text": 0}  # llama.cpp's, where a file says none
LARGE = {"gemma2": 46, "gemma3_text": 62}  # blocks of the 27B, whose queries llama.cpp scales otherwise


def settle(config, said: dict) -> None:
    """Give a configuration what a file says: {field, without its architecture: number or list}. ValueError
    for a field that the configuration has no place for, unless its value changes nothing."""
    if getattr(config, "rope_parameters", None):
        said = {"rope.freq_base": 10_000.0} | said  # llama.cpp's default
    if config.model_type in WINDOWS:
        said = {"attention.sliding_window": WINDOWS[config.model_type]} | said
    for field, value in said.items():
        own = field == "attention.head_count_kv" and value == said.get("attention.head_count")  # no groups
        if not (_placed(config, field, value) or own or field in ELSEWHERE or _changes_nothing(field, value)):
            raise ValueError(f"it says {field} = {shown(str(value))}, and transformers has no place for that")
    kinds = getattr(config, "layer_types", None) or ()
    if said.get("attention.sliding_window") == 0 and any(one in LOCAL for one in kinds):
        config.sliding_window = config.max_position_embeddings  # of no layer, but its model needs a number
        config.layer_types = ["full_attention" if one in LOCAL else one for one in kinds]
    if hasattr(config, "query_pre_attn_scalar"):  # llama.cpp knows it, and no field says it
        large = LARGE.get(config.model_type) == config.num_hidden_layers
        config.query_pre_attn_scalar = (
            config.hidden_size // config.num_attention_heads if large else config.head_dim
        )


def _placed(config, field: str, value) -> bool:
    """Whether the configuration has a place for this field, where the value is now."""
    kinds, turns = getattr(config, "layer_types", None), getattr(config, "rope_parameters", None) or {}
    if field == "attention.sliding_window_pattern" and kinds:
        local = value
        if isinstance(value, int) and value >= 0:  # 0: every layer
            local = [not value or (at + 1) % value != 0 for at in range(len(kinds))]
        if not isinstance(local, list) or len(local) != len(kinds):
            return False
        config.layer_types = ["sliding_attention" if one else "full_attention" for one in local]
        return True
    if field in ROTATIONS:
        part = turns.get(ROTATIONS[field], turns if field == "rope.freq_base" else None)
        if part:
            part["rope_theta"] = value
        return bool(part)
    if field == "attention.sliding_window" and (value < 0 or "sliding_attention" not in (kinds or LOCAL)):
        return False
    if field == "attention.key_length" and hasattr(config, "kv_lora_rank"):  # of latents
        return False
    if field == "attention.head_count_kv" and isinstance(value, list):  # 0 where a layer has no attention
        value = max(value)
    if isinstance(value, list):
        return False
    computed = lambda name: isinstance(getattr(type(config), name, None), property)  # of other numbers
    names = (name for name in NAMES.get(field, ()) if hasattr(config, name) and not computed(name))
    name = next(names, None)
    if name is not None:
        value = None if field in NONE_AT_0 and value == 0 else value
        setattr(config, name, value)
    return name is not None


def _changes_nothing(field: str, value) -> bool:
    if field == "attention.causal":
        return bool(value)
    return not value or value == "none" or (value == 1 and field.endswith(("_scale", "_factor")))
