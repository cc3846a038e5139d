"""Key channels that are larger and larger, in a model whose answers stay the same.

`PYTHONPATH=tests python -m gating.planted` writes what every format then costs, for docs/gate.md.
"""

import copy
import json
from pathlib import Path

import torch

import kvlab
from kvlab.gating import gate
from kvlab.gating.gate import FORMATS

STORED = Path(__file__).parents[2] / "docs" / "results" / "gate" / "planted.json"
TIMES = (1, 3, 10, 30, 100, 300)


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


def main() -> None:
    model, tokenizer = kvlab.load()
    rows = []
    for times in TIMES:
        found = gate(planted(model, times), tokenizer, FORMATS, minutes=60)
        largest = max(layer.outlier for layer in found.layers)
        rows += [
            {"times": times, "outlier": largest, "method": line.method, "verdict": line.verdict}
            | {"noise": line.cost.noise, "nats": line.cost.nats}
            for line in found.lines
            if line.cost is not None
        ]
        print(f"{times}: {len(found.lines)} formats", flush=True)
    STORED.parent.mkdir(exist_ok=True)
    STORED.write_text(json.dumps({"made": found.made, "rows": rows}, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
