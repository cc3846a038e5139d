"""Small GGUF files, made from a seeded random Llama as llama.cpp's converter would make them."""

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
MERGES = ["Ġ Ġ", "Ċ Ċ", "t h", "th e", "Ġ the"]
TOKENS = [*CONTROL, *sorted(ByteLevel.alphabet()), "ĠĠ", "ĊĊ", "th", "the", "Ġthe"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS, THETA = 4, 2, 50_000.0


def model() -> LlamaForCausalLM:
    """4 heads, 2 KV heads of 16, hidden 64, tied embeddings; weights so large that attention is peaked."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=16, tie_word_embeddings=True,
        max_position_embeddings=128, rms_norm_eps=1e-5, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write(file, kind="F32", pre="smollm", architecture="llama", without=(), more=()):
    """Write `model()`, its matrices in quantization type `kind`; returns (model, {tensor: what was written}).
    without: names of tensors that are left out. more: fields: (method of the writer, its arguments).

    llama.cpp rotates neighbouring channels, transformers channels half a head apart, so rows of W_q and W_k
    change places in the file.
    """
    import gguf

    made, out = model(), gguf.GGUFWriter(file, architecture)
    config = made.config
    out.add_name("A small model")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_rope_dimension_count(16)
    out.add_rope_freq_base(THETA)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_vocab_size(len(TOKENS))
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre(pre)
    out.add_token_list(TOKENS)
    out.add_token_types([3 if token in CONTROL else 1 for token in TOKENS])
    out.add_token_merges(MERGES)
    for add, token in ((out.add_bos_token_id, 1), (out.add_eos_token_id, 2), (out.add_unk_token_id, 0)):
        add(token)
    out.add_pad_token_id(2)
    out.add_add_bos_token(False)
    out.add_chat_template(TEMPLATE)
    for method, *given in more:
        getattr(out, method)(*given)

    kind, written = gguf.GGMLQuantizationType[kind], {}
    for name, weight in tensors(made):
        if name in without:
            continue
        array = weight.detach().numpy()
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            if kind == gguf.GGMLQuantizationType.Q8_1:  # nothing decodes it, so its bytes do not matter
                array = np.zeros((array.shape[0], array.shape[1] // 32 * 40), np.uint8)
            else:
                array = gguf.quantize(array, kind)
            out.add_tensor(name, array, raw_dtype=kind)
        else:
            out.add_tensor(name, array)
        written[name] = array
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return made, written


def tensors(made):
    """(name in the file, weight) of every tensor."""
    yield "token_embd.weight", made.model.embed_tokens.weight
    yield "output_norm.weight", made.model.norm.weight
    for i, layer in enumerate(made.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"blk.{i}.attn_norm.weight", layer.input_layernorm.weight
        yield f"blk.{i}.attn_q.weight", neighbours(attention.q_proj.weight, HEADS)
        yield f"blk.{i}.attn_k.weight", neighbours(attention.k_proj.weight, KV_HEADS)
        yield f"blk.{i}.attn_v.weight", attention.v_proj.weight
        yield f"blk.{i}.attn_output.weight", attention.o_proj.weight
        yield f"blk.{i}.ffn_norm.weight", layer.post_attention_layernorm.weight
        yield f"blk.{i}.ffn_gate.weight", mlp.gate_proj.weight
        yield f"blk.{i}.ffn_up.weight", mlp.up_proj.weight
        yield f"blk.{i}.ffn_down.weight", mlp.down_proj.weight


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads x (half, pair)]` -> `[heads x (pair, half)]`: what rotates together stands together."""
    rows, width = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width).contiguous()
    )
