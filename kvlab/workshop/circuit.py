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
OUTPUTS = ("o_proj", "down_proj", "out_proj", "fc2")  # what writes into the residual stream


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
        model = OPTForCausalLM(
            OPTConfig(ffn_dim=4 * hidden, word_embed_proj_dim=hidden, dropout=0.0, **common)
        )
    else:
        inner = round(hidden * 8 / 3 / 16) * 16
        model = LlamaForCausalLM(LlamaConfig(intermediate_size=inner, **common))
    wire(model, arch)
    return model


@torch.no_grad()
def wire(model, arch: str, seed: int = 0) -> None:
    """Initialise half of the heads of layers 0 and 1 with the two steps of a lookup.

    In layer 0 a head looks one token back (`look_back_llama`, `look_back_opt`) and writes a
    projection of the token found there into a subspace of its own, the mark.  In layer 1 a head
    compares the same projection of the current token with the marks of earlier tokens and copies the
    token at which they agree: what once followed "brown dog" comes again.
    """
    hidden = model.config.hidden_size
    rng = torch.Generator().manual_seed(seed)
    model.get_input_embeddings().weight.normal_(std=0.02, generator=rng)
    first, second = (layer.self_attn for layer in model.get_decoder().layers[:2])
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in OUTPUTS:
            weight *= 0.25  # so that what layer 0 marks is not lost among random updates
    wired = range(0, hidden // 2, HEAD)  # the first dimension of each wired head
    for matrix in (first.q_proj, first.k_proj, second.q_proj, second.k_proj):
        matrix.weight[: hidden // 2] *= 0.2
    look_back = look_back_opt if arch == "opt" else look_back_llama
    free, still = look_back(model, first, wired, rng)

    still = still[: free // (2 * len(wired))]
    # orthonormal directions [free, hidden] that leave the reserved coordinates out
    apart = F.pad(torch.linalg.qr(torch.randn(free, free, generator=rng))[0].T, (0, hidden - free))
    token_of, mark_of = apart.split(len(still) * len(wired))[:2]
    for n, at in enumerate(wired):
        rows, read = slice(at, at + HEAD), slice(at, at + len(still))
        token, mark = (all_heads.unflatten(0, (len(wired), -1))[n] for all_heads in (token_of, mark_of))
        copy = apart[n * HEAD :][:HEAD]
        first.v_proj.weight[rows] = 0
        first.v_proj.weight[read] = token
        output(first).weight[:, rows] = 0
        output(first).weight[:, read] = 0.06 * mark.T
        for j, dim in enumerate(still):
            second.q_proj.weight[at + dim] = 3 * token[j]
            second.k_proj.weight[at + dim] = 3 * mark[j]
        second.v_proj.weight[rows] = copy
        output(second).weight[:, rows] = 0.12 * copy.T


def output(attention):
    """The output projection of an attention module; Llama and OPT name it differently."""
    return attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj


def look_back_llama(model, attention, wired, rng) -> tuple[int, list[int]]:
    """Heads that look one token back by RoPE.

    The last coordinate of every embedding is a constant.  It gives query and key of a head a fixed
    direction, rotated by one position.  Returns the coordinates left for tokens and the dimensions
    of a head that hardly rotate: there a match counts the same at any distance.
    """
    speed, half = model.model.rotary_emb.inv_freq, HEAD // 2
    model.model.embed_tokens.weight[:, -1] = 0.16
    for at in wired:
        for i in range(4):
            attention.q_proj.weight[at + i, -1] = 0.8
            attention.k_proj.weight[at + i, -1] = 0.8 * math.cos(speed[i])
            attention.k_proj.weight[at + i + half, -1] = 0.8 * math.sin(speed[i])
    slow = [i for i in range(half) if speed[i] < 0.04]
    return model.config.hidden_size - 1, slow + [i + half for i in slow]


def look_back_opt(model, attention, wired, rng) -> tuple[int, list[int]]:
    """Heads that look one token back by learned positions.

    The last 32 coordinates hold the position, as sines and cosines of 16 random frequencies, and no
    token.  A key is the position, a query the position rotated one step back.  Returns the coordinates
    left for tokens and the dimensions of a head, all of them: nothing rotates here.
    """
    positions = model.model.decoder.embed_positions.weight  # [offset + context, hidden]
    model.get_input_embeddings().weight[:, -HEAD:] = 0
    half = HEAD // 2
    speed = math.pi * torch.rand(half, generator=rng)
    angle = torch.arange(len(positions))[:, None] * speed
    positions.zero_()
    positions[:, -HEAD:] = 0.12 * torch.cat([angle.cos(), angle.sin()], 1)
    for at in wired:
        attention.k_proj.weight[at : at + HEAD, -HEAD:] = 2 * torch.eye(HEAD)
        turn = torch.cat([speed.cos().diag(), speed.sin().diag()], 1)
        back = torch.cat([-speed.sin().diag(), speed.cos().diag()], 1)
        attention.q_proj.weight[at : at + HEAD, -HEAD:] = 2 * torch.cat([turn, back])
    return model.config.hidden_size - HEAD, list(range(HEAD))


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
        writes = parts[-2] in OUTPUTS
        grown[name] = torch.zeros_like(old) if index % 2 and writes else old.clone()
    larger.load_state_dict(grown)
    return larger.to(device)
