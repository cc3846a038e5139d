"""The untrained model: its shape, its wired first layers, its growth from four layers to eight.

A model that looks something up needs two heads: one that marks every token with the token before it,
and one that finds the token so marked and copies it (Olsson et al. 2022, "In-context Learning and
Induction Heads").  A small model finds this pair late or not at all, so training starts from it.
"""

import math
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Sizes:
    """Standard deviation of an embedding, and the strength with which a wired head writes."""

    embedding: float
    mark: float
    copy: float


SIZES = {"llama": Sizes(0.02, 0.06, 0.12), "opt": Sizes(0.07, 0.25, 0.4)}
WINDOW = 0.5  # strength of the marks of OPT's wide looks


@torch.no_grad()
def wire(model, arch: str, seed: int = 0) -> None:
    """Initialise heads of layers 0 and 1 with the two steps of a lookup.

    In layer 0 a head looks back (`look_back_llama`, `look_back_opt`) and writes a projection of what it
    finds there into a subspace of its own, the mark.  In layer 1 a head compares marks and copies the
    token at which they agree.  Half of the heads look one token back and compare that mark with the
    token itself: what once followed "brown dog" comes again.

    With RoPE they widen while the model learns, and see the key several words before its value ("the red
    key is in the barn").  Learned positions do not, so in OPT two more pairs of heads look at a few
    tokens, about 3 back and about 4 back, and compare the one mark with the other: what stood behind
    "the red key is in the" is found where the question has come as far.
    """
    hidden, sizes = model.config.hidden_size, SIZES[arch]
    rng = torch.Generator().manual_seed(seed)
    model.get_input_embeddings().weight.normal_(std=sizes.embedding, generator=rng)
    first, second = (layer.self_attn for layer in model.get_decoder().layers[:2])
    for name, weight in model.named_parameters():
        if name.split(".")[-2] in OUTPUTS:
            weight *= 0.25  # so that what layer 0 marks is not lost among random updates
    single = range(0, hidden // 2, HEAD)  # the first dimension of each head
    pairs = []
    if arch == "opt":
        pairs = [(at, at + HEAD) for at in range(hidden // 2, hidden - HEAD, 2 * HEAD)]
    wired = slice(0, hidden if pairs else hidden // 2)
    for matrix in (first.q_proj, first.k_proj, second.q_proj, second.k_proj):
        matrix.weight[wired] *= 0.2
    look_back = look_back_opt if arch == "opt" else look_back_llama
    free, still, look = look_back(model, first, rng)
    size = min(len(still), free // (2 * len(single) + 2 * len(pairs)))
    # orthonormal directions [free, hidden] that leave the reserved coordinates out, `size` for each use
    apart = F.pad(torch.linalg.qr(torch.randn(free, free, generator=rng))[0].T, (0, hidden - free))
    uses = apart.split(size)

    def carry(at, token, mark, strength):
        """Layer 0: what the head finds, projected on `token`, is written as `mark`."""
        first.v_proj.weight[at : at + HEAD] = 0
        first.v_proj.weight[at : at + size] = token
        output(first).weight[:, at : at + HEAD] = 0
        output(first).weight[:, at : at + size] = strength * mark.T

    def compare(at, asked, stated):
        """Layer 1: where `asked` here equals `stated` there, the token there is copied."""
        for dim, question, statement in zip(still, asked, stated):
            second.q_proj.weight[at + dim] = 3 * question
            second.k_proj.weight[at + dim] = 3 * statement
        copy = apart[at % (hidden // 2) :][:HEAD]
        second.v_proj.weight[at : at + HEAD] = copy
        output(second).weight[:, at : at + HEAD] = sizes.copy * copy.T

    for n, at in enumerate(single):
        token, mark = uses[n], uses[len(single) + n]
        look(at, 1.0)
        carry(at, token, mark, sizes.mark)
        compare(at, token, mark)
    for n, (near, far) in enumerate(pairs):
        asked, stated = uses[2 * (len(single) + n) :][:2]
        for at, mark, steps in ((near, asked, 2.5 + n), (far, stated, 3.5 + n)):
            look(at, steps, wide=True)
            carry(at, uses[n], mark, WINDOW)
        compare(near, asked, stated)


def output(attention):
    """The output projection of an attention module; Llama and OPT name it differently."""
    return attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj


def look_back_llama(model, attention, rng):
    """How a head looks back by RoPE.

    The last coordinate of every embedding is a constant.  It gives query and key of a head a fixed
    direction, rotated by as many positions as the head looks back.  Returns the number of coordinates
    left for tokens; the dimensions of a head that hardly rotate, where a match counts the same at any
    distance; and a function that sets a head.
    """
    speed, half = model.model.rotary_emb.inv_freq, HEAD // 2
    model.model.embed_tokens.weight[:, -1] = 0.16

    def look(at, steps):
        for i in range(4):
            attention.q_proj.weight[at + i, -1] = 0.8
            attention.k_proj.weight[at + i, -1] = 0.8 * math.cos(steps * speed[i])
            attention.k_proj.weight[at + i + half, -1] = 0.8 * math.sin(steps * speed[i])

    slow = [i for i in range(half) if speed[i] < 0.04]
    return model.config.hidden_size - 1, slow + [i + half for i in slow], look


def look_back_opt(model, attention, rng):
    """How a head looks back by learned positions; returns what `look_back_llama` does.

    The last 32 coordinates hold the position, as sines and cosines of 16 frequencies, and no token.  A
    key is the position, a query the position rotated some steps back; a wide look uses the slow ones.
    """
    positions = model.model.decoder.embed_positions.weight  # [offset + context, hidden]
    model.get_input_embeddings().weight[:, -HEAD:] = 0
    half = HEAD // 2
    speed = math.pi * 0.01 ** torch.rand(half, generator=rng)  # radians per token, .03 to 3
    angle = torch.arange(len(positions))[:, None] * speed
    positions.zero_()
    positions[:, -HEAD:] = 0.12 * torch.cat([angle.cos(), angle.sin()], 1)

    def look(at, steps, wide=False):
        gain = 1.7 * (speed < 0.5) if wide else torch.full_like(speed, 2.0)
        cos, sin = (gain * (steps * speed).cos()).diag(), (gain * (steps * speed).sin()).diag()
        turned = torch.cat([torch.cat([cos, sin], 1), torch.cat([-sin, cos], 1)])
        attention.q_proj.weight[at : at + HEAD, -HEAD:] = turned
        attention.k_proj.weight[at : at + HEAD, -HEAD:] = torch.cat([gain, gain]).diag()

    return model.config.hidden_size - HEAD, list(range(HEAD)), look


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
