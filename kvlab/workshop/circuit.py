"""The untrained model: its shape, its wired first layers, its growth from four layers to eight.

A model that looks something up needs two heads: one that marks every token with the token before it,
and one that finds the token so marked and copies it (Olsson et al. 2022, "In-context Learning and
Induction Heads").  A small model finds this pair late or not at all, so training starts from it.
"""

import math

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

CONTEXT, HEAD = 2048, 32  # longest sequence in tokens, head dimension


def blocked(module, query, key, value, mask, scaling, dropout=0.0, block=128, **_):
    """Causal attention in blocks of queries, q k v [batch, heads, tokens, head_dim].

    On a CPU, with heads of 32 dimensions and short rows, twice to five times faster than the fused
    kernel.  Rows hold no padding, so `mask` is not needed.
    """
    query, out = query * scaling, []
    future = query.new_full((block, block), -1e4).triu(1)
    for start in range(0, query.shape[2], block):
        end = min(start + block, query.shape[2])
        scores = query[:, :, start:end] @ key[:, :, :end].transpose(-1, -2)
        scores[..., start:] += future[: end - start, : end - start]
        out.append(scores.softmax(-1) @ value[:, :, :end])
    return torch.cat(out, 2).transpose(1, 2), None


AttentionInterface.register("blocked", blocked)


def build(arch: str, layers: int, hidden: int, vocabulary: int, device: str):
    """An untrained model with heads of 32 dimensions and tied embeddings."""
    common = dict(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        attn_implementation="blocked" if device == "cpu" else "sdpa",
    )
    if arch == "opt":
        return OPTForCausalLM(
            OPTConfig(ffn_dim=4 * hidden, word_embed_proj_dim=hidden, dropout=0.0, **common)
        )
    inner = round(hidden * 8 / 3 / 16) * 16
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=inner, **common))
    wire(model)
    return model


@torch.no_grad()
def wire(model, seed: int = 0) -> None:
    """Initialise half of the heads of layers 0 and 1 with the two steps of a lookup.

    The last coordinate of every embedding is a constant.  In layer 0 it gives query and key of a
    head a fixed direction, rotated by one position, so that the head looks one token back; it
    writes a projection of the token found there into a subspace of its own, the mark.  In layer 1 a
    head compares the same projection of the current token with the marks of earlier tokens, in the
    slowly rotating dimensions, where distance matters little, and copies the token at which they
    agree: what once followed "brown dog" comes again.
    """
    hidden, half = model.config.hidden_size, HEAD // 2
    rng = torch.Generator().manual_seed(seed)
    speed = model.model.rotary_emb.inv_freq
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=0.02, generator=rng)
    embedding[:, -1] = 0.16

    def directions(count):  # orthonormal rows [count, hidden] that leave the constant out
        return F.pad(torch.linalg.qr(torch.randn(hidden - 1, count, generator=rng))[0].T, (0, 1))

    slow = [i for i in range(half) if speed[i] < 0.04]
    slow += [i + half for i in slow]
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    for at in range(0, hidden // 2, HEAD):  # the first dimension of each wired head
        rows, read = slice(at, at + HEAD), slice(at, at + len(slow))
        for matrix in (first.q_proj, first.k_proj, second.q_proj, second.k_proj):
            matrix.weight[rows] *= 0.2
        for i in range(4):
            first.q_proj.weight[at + i, -1] = 0.8
            first.k_proj.weight[at + i, -1] = 0.8 * math.cos(speed[i])
            first.k_proj.weight[at + i + half, -1] = 0.8 * math.sin(speed[i])
        token, mark, copy = directions(len(slow)), directions(len(slow)), directions(HEAD)
        first.v_proj.weight[rows] = 0
        first.v_proj.weight[read] = token
        first.o_proj.weight[:, rows] = 0
        first.o_proj.weight[:, read] = 0.04 * mark.T
        for j, dim in enumerate(slow):
            second.q_proj.weight[at + dim] = 2 * token[j]
            second.k_proj.weight[at + dim] = 2 * mark[j]
        second.v_proj.weight[rows] = copy
        second.o_proj.weight[:, rows] = 0.1 * copy.T


@torch.no_grad()
def grow(model, arch: str, device: str):
    """Twice as many layers, same logits: each old one is followed by a copy that adds nothing yet."""
    config = model.config
    larger = build(arch, 2 * config.num_hidden_layers, config.hidden_size, config.vocab_size, device)
    state, grown = model.state_dict(), {}
    for name in larger.state_dict():
        parts = name.split(".")
        if "layers" not in parts:
            grown[name] = state[name]
            continue
        at = parts.index("layers") + 1
        index = int(parts[at])
        parts[at] = str(index // 2)
        old = state[".".join(parts)]
        writes = parts[-2] in ("o_proj", "down_proj", "out_proj", "fc2")
        grown[name] = torch.zeros_like(old) if index % 2 and writes else old.clone()
    larger.load_state_dict(grown)
    return larger.to(device)
