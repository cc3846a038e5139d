"""Tiny random models of every family, odd on purpose: sizes that no two things share by accident."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from kvlab.models.shrunk import random_model

VOCABULARY = 96
WINDOW = 7
COMMON = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 44, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": None,
    "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
G = {"hidden_size": 63, "head_dim": 8}  # head dimension is not hidden / heads
H = {"hidden_size": 72}
E = {"hidden_size": 108, "head_dim": 8}  # experts want sizes in multiples of 4
MHA = {"num_key_value_heads": None}  # these know nothing of KV heads
W = {"sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
SLIDING = ["sliding_attention", "full_attention"]
PARTIAL = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
MAMBA = {
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 6, "mamba_d_head": 36,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip

# name in the table: (model type, what is odd about it)
FAMILIES = {
    "Llama": ("llama", G | {"attention_bias": True}),
    "Mistral": ("mistral", G | W),
    "Mixtral": ("mixtral", E | W | EXPERTS),
    "Qwen2": ("qwen2", H | W | {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3": ("qwen3", G | W | {"use_sliding_window": True, "max_window_layers": 1}),
    "Qwen3-MoE": ("qwen3_moe", E | EXPERTS),
    "Phi": ("phi", H | PARTIAL | {"qk_layernorm": True}),
    "Phi-3": ("phi3", H | W | {"original_max_position_embeddings": 128}),
    "Gemma 2": ("gemma2", G | W | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 10}),
    "Gemma 3": ("gemma3_text", G | W | {"query_pre_attn_scalar": 10, "layer_types": SLIDING}),
    "OLMo 2": ("olmo2", H),
    "SmolLM3": ("smollm3", H | W | {"no_rope_layers": [1, 0], "use_sliding_window": True,
                                    "layer_types": SLIDING}),
    "GLM-4": ("glm4", G | PARTIAL | {"attention_bias": True}),
    "Cohere 2": ("cohere2", G | W | {"layer_types": SLIDING, "logit_scale": 1.0}),
    "StableLM": ("stablelm", H | PARTIAL | {"qk_layernorm": True, "use_qkv_bias": True}),
    "Granite": ("granite", H | {"attention_multiplier": 0.3, "residual_multiplier": 0.7,
                                "embedding_multiplier": 3.0, "logits_scaling": 1.3}),
    "gpt-oss": ("gpt_oss", E | W | EXPERTS | {"layer_types": SLIDING}),
    "OPT": ("opt", H | MHA | {"word_embed_proj_dim": 60, "ffn_dim": 44, "do_layer_norm_before": True}),
    "GPT-2": ("gpt2", MHA | {"n_embd": 72, "n_head": 9, "n_layer": 2, "n_positions": 128,
                       "scale_attn_by_inverse_layer_idx": True}),
    "GPT-NeoX": ("gpt_neox", H | MHA | PARTIAL),
    "Llama 4": ("llama4_text", E | EXPERTS | {"attention_chunk_size": 5, "intermediate_size_mlp": 44,
                                              "no_rope_layers": [1, 0]}),
    "Llama 4, chunk 64": ("llama4_text", E | EXPERTS | {"attention_chunk_size": 64,
                          "intermediate_size_mlp": 44, "no_rope_layers": [1, 0]}),
    "Qwen3-Next": ("qwen3_next", E | EXPERTS | {"shared_expert_intermediate_size": 20,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}),
    "LFM2": ("lfm2", H | {"block_ff_dim": 44, "block_auto_adjust_ff_dim": False,
                          "layer_types": ["conv", "full_attention"]}),
    "Granite 4": ("granitemoehybrid", {"hidden_size": 108, "shared_intermediate_size": 20,
        "layer_types": ["linear_attention", "full_attention"], "attention_multiplier": 0.3}
        | EXPERTS | MAMBA),
    "Jamba": ("jamba", {"hidden_size": 108, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_dt_rank": 5, "use_mamba_kernels": False}
        | EXPERTS | MAMBA),
    "Falcon-H1": ("falcon_h1", E | MAMBA | {"mamba_d_ssm": 216}),
    "DeepSeek-V2": ("deepseek_v2", None),
    "DeepSeek-V3": ("deepseek_v3", None),
}  # fmt: skip
LATENT = {
    "hidden_size": 72, "num_hidden_layers": 2, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6, "v_head_dim": 5, "head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "num_attention_heads": 3, "num_key_value_heads": 3,
}  # fmt: skip
# All layers behind the window or chunk, so that any budget above it gives nothing up.
HIDDEN = {
    "Mistral": {},
    "Mixtral": {},
    "Qwen2": {"max_window_layers": 0},
    "Qwen3": {"max_window_layers": 0},
    "Phi-3": {},
    "Gemma 2": {"layer_types": ["sliding_attention"] * 2},
    "Gemma 3": {"layer_types": ["sliding_attention"] * 2},
    "SmolLM3": {"layer_types": ["sliding_attention"] * 2},
    "Cohere 2": {"layer_types": ["sliding_attention"] * 2},
    "gpt-oss": {"layer_types": ["sliding_attention"] * 2},
    "Llama 4": {"no_rope_layers": [1, 1]},
}
SMALL = COMMON | H
REFUSED = {  # name -> (model type, sizes, what the one line says)
    "Mamba": ("mamba", {}, "no layer of it holds keys and values"),
    "Mamba 2": ("mamba2", {"hidden_size": 36, "num_heads": 9, "head_dim": 8, "n_groups": 1, "state_size": 8},
                "no layer of it holds keys and values"),
    "Falcon-Mamba": ("falcon_mamba", {}, "no layer of it holds keys and values"),
    "RWKV": ("rwkv", {"attention_hidden_size": 72}, "attention interface"),
    "RecurrentGemma": ("recurrent_gemma", {"lru_width": 72, "attention_window_size": 7,
                                          "num_hidden_layers": 3}, "no cache"),
    "MiniMax": ("minimax", {"hidden_size": 108, "head_dim": 8, "num_local_experts": 4, "block_size": 8},
                "something of its own with K and V"),
    "Gemma 3n": ("gemma3n_text", {"num_kv_shared_layers": 2, "num_hidden_layers": 4, "head_dim": 8,
        "intermediate_size": [44] * 4, "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"] * 2},
        "it shares keys and values between layers in a way of its own"),
    "Doge": ("doge", {}, "something of its own with K and V"),
    "DiffLlama": ("diffllama", {"num_attention_heads": 6, "num_key_value_heads": 2},
                  "something of its own with K and V"),
    "Falcon (old)": ("falcon", {}, "attention interface"),
    "Bloom": ("bloom", {"n_head": 9, "n_layer": 2}, "attention interface"),
    "MPT": ("mpt", {"d_model": 72, "n_heads": 9, "n_layers": 2}, "attention interface"),
    "GPT-J": ("gptj", {"n_embd": 72, "n_head": 9, "n_layer": 2, "rotary_dim": 4}, "attention interface"),
    "T5": ("t5", {"d_model": 72, "num_heads": 9, "d_kv": 8, "num_layers": 2}, "as a decoder"),
}  # fmt: skip


def build(kind: str, odd: dict, seed: int = 7):
    """A tiny random model of a type, made as kvlab makes its twins."""
    given = COMMON | odd
    if given["num_key_value_heads"] is None:
        del given["num_key_value_heads"]
    return random_model(AutoConfig.for_model(kind, **given), seed)


def family(name: str, **changes):
    """A family's model."""
    kind, odd = FAMILIES[name]
    return build(kind, (LATENT if odd is None else odd) | changes)


def refused(name: str):
    """The model of a family that kvlab refuses."""
    kind, odd, _ = REFUSED[name]
    make = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    return make.from_config(AutoConfig.for_model(kind, **(SMALL | odd)))
