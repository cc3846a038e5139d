"""Key channels that are larger and larger, in a model whose answers stay the same, and a bias of W_k.

`PYTHONPATH=tests python -m gating.planted` writes what every format then costs, for docs/gate.md.
"""

import copy
import json
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import kvlab
from kvlab.gating import gate
from kvlab.gating.gate import FORMATS

STORED = Path(__file__).parents[2] / "docs" / "results" / "gate" / "planted.json"
TIMES = (1, 3, 10, 30, 100, 300)
BIASES = (0, 3, 10, 30, 100, 300, 1000)
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


def main() -> None:
    model, tokenizer = kvlab.load()
    rows, models = [], [({"times": times}, planted(model, times)) for times in TIMES]
    for what, one in models + [({"bias": bias}, biased(model, bias)) for bias in BIASES]:
        found = gate(one, tokenizer, FORMATS, minutes=60)
        largest = max(layer.outlier for layer in found.layers)
        rows += [
            what
            | {"outlier": largest, "method": line.method, "verdict": line.verdict}
            | {"noise": line.cost.noise, "nats": line.cost.nats}
            for line in found.lines
            if line.cost is not None
        ]
        print(f"{what}: {len(found.lines)} formats", flush=True)
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps({"made": found.made, "rows": rows}, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
