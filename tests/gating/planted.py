"""Key channels that are larger and larger, in a model whose answers stay the same, a bias of W_k, and a sink;
the bias in random models of other families, too.

`PYTHONPATH=tests python -m gating.planted` writes what every format then costs, for docs/gate.md.
"""

import copy
import json
from pathlib import Path

import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

import kvlab
from kvlab.gating import gate
from kvlab.gating.gate import FORMATS
from kvlab.gating.rules import DECODED, PIECES, PROMPT
from kvlab.gating.texts import rows
from kvlab.models.shrunk import random_model

STORED = Path(__file__).parents[2] / "docs" / "results" / "gate" / "planted.json"
TIMES = (1, 3, 10, 30, 100, 300)
BIASES = (0, 3, 10, 30, 100, 300, 1000)
SINKS = (1, 3, 10, 30, 100, 300, 1000)
NATS = 4.0  # that a sink's scores gain
RANDOM = ("gpt_neox", "phi", "starcoder2")  # W_k is one with W_q and W_v; is alone; has two heads for four
LOUD = 4.0  # times as large logits as random weights give: their next tokens are about as sure as a model's
NOT_SHARED = ("model_type", "architectures", "attention_bias", "mlp_bias", "transformers_version")


def planted(model, times: float):
    """The same function of the same text, with two key channels of every head that are `times` as large: what
    W_k has more W_q has less, of a pair that RoPE turns together."""
    model = copy.deepcopy(model)
    half = model.config.head_dim // 2
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, by in ((layer.self_attn.k_proj, times), (layer.self_attn.q_proj, 1 / times)):
                weight = projection.weight.view(-1, 2, half, projection.weight.shape[1])
                weight[:, :, 5] *= by
    return model


def biased(model, bias: float):
    """A Llama as a Qwen2, whose W_k has this bias in one channel of every head: one that RoPE hardly turns,
    so that it adds about the same to all scores of a query."""
    about = {name: value for name, value in model.config.to_dict().items() if name not in NOT_SHARED}
    made = Qwen2ForCausalLM(Qwen2Config(**about, use_sliding_window=False)).eval()
    made.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in made.model.layers:
            for part in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                part.bias.zero_()
            layer.self_attn.k_proj.bias.view(-1, model.config.head_dim)[:, -1] = bias
    return made


@torch.no_grad()
def random(family: str, bias: float, vocabulary: int):
    """A random model of a family, whose W_k has this bias in the last channel of every head."""
    sizes = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": vocabulary, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"num_key_value_heads": 2} if family == "starcoder2" else {}
    made = random_model(AutoConfig.for_model(family, **sizes, tie_word_embeddings=False), len(family))
    made.get_output_embeddings().weight.mul_(LOUD)
    for name, parameter in made.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.view(-1, 24)[:, -1] = bias
        elif name.endswith("query_key_value.bias"):
            parameter.view(4, 3, 24)[:, 1, -1] = bias
    return made


@torch.no_grad()
def sunk(model, ids, size: float):
    """A Llama as a Qwen2, in which the first token's key, and hardly another's, has this number in a channel
    of every head, the one that RoPE turns least. Queries have the same number there. Its scores gain
    `NATS`, whatever the size. ids: texts `[rows, tokens]` that begin with it, and from which it is told."""
    made, size_of = biased(model, 0.0), model.config.head_dim
    for layer in made.model.layers:
        inputs, attention = [], layer.self_attn
        hook = attention.k_proj.register_forward_pre_hook(lambda _, given, to=inputs: to.append(given[0]))
        made(ids)
        hook.remove()
        first, others = inputs[0][0, 0], inputs[0][:, 1:].flatten(0, 1)  # [hidden], [other tokens, hidden]
        spread = others.T @ others / len(others)
        finds = torch.linalg.solve(spread + 1e-3 * spread.diagonal().mean() * torch.eye(len(first)), first)
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.view(-1, size_of, len(first))[:, [size_of // 2 - 1, -1]] = 0.0
        attention.k_proj.weight.view(-1, size_of, len(first))[:, -1] = size * finds / (finds @ first)
        attention.q_proj.bias.view(-1, size_of)[:, -1] = NATS * size_of**0.5 / size
    return made


def main() -> None:
    model, tokenizer = kvlab.load()
    begins = copy.deepcopy(tokenizer)  # every text is behind its first token, the sink
    first = (begins.bos_token, begins.bos_token_id)
    begins.backend_tokenizer.post_processor = TemplateProcessing(f"{first[0]} $A", special_tokens=[first])
    ids = rows(begins, PROMPT + DECODED, PIECES)
    found, models = [], [({"times": times}, planted(model, times)) for times in TIMES]
    models += [({"bias": bias}, biased(model, bias)) for bias in BIASES]
    models += [({"sink": size}, sunk(model, ids, size)) for size in SINKS]
    models += [
        ({"family": family, "bias": bias}, random(family, bias, len(tokenizer)))
        for family in RANDOM
        for bias in BIASES
    ]
    for what, one in models:
        judged = gate(one, begins if "sink" in what else tokenizer, FORMATS, minutes=60)
        largest = max(layer.outlier for layer in judged.layers)
        found += [
            what
            | {"outlier": largest, "method": line.method, "verdict": line.verdict}
            | {"noise": line.noise, "nats": line.cost.nats}
            for line in judged.lines
            if line.cost is not None
        ]
        print(f"{what}: {len(judged.lines)} formats", flush=True)
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps({"made": judged.made, "rows": found}, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
