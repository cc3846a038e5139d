"""The simulator beside a real GPU's bars: launches counted here, seconds taken from rows of the same run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eval.gpu import headline, launches, models, predict
from kvlab import faster
from kvlab.arithmetic import Machine
from kvlab.models import ModelShape

H200 = Path(__file__).parents[3] / "docs" / "results" / "gpu" / "h200-61d36dd.json"
PLANNED = {"full": 1, "offload": 1, "uvm": 1, "infinigen": 2}  # lengths of a step that cuDNN had not met yet
HF_LAYERS = 32


def test_every_bar_of_the_h200_run_is_predicted_within_a_fifth(bench, monkeypatch):
    """What the run's other rows say: an operator's time is that of transformers' static cache; cuDNN, which
    attended then, planned for every new length, which is what their dynamic cache takes more; whole layers
    were gathered on the host, at the speed of one bar of `offload`; and where a token goes at every step the
    host moved all others, which one bar of `offload+h2o` shows, to unified memory by a pageable copy."""
    monkeypatch.setattr(faster, "lodger", lambda: None)  # as on a GPU
    units = json.loads(H200.read_text())["units"]
    rows = [row for name, unit in units.items() for row in unit["rows"] if name.startswith("headline")]
    found = launches.measured(bench, predict.SYSTEMS, lambda: headline.throttled(bench))
    steps = {
        row["method"]: row["ms"] / 1e3
        for name, unit in units.items()
        if "eager" in name
        for row in unit["rows"]
    }
    theirs = {name: operators_of(name) * HF_LAYERS for name in ("hf-static", "hf-dynamic")}
    operator = steps["hf-static"] / theirs["hf-static"]
    plan = steps["hf-dynamic"] - operator * theirs["hf-dynamic"]
    assert 5e-6 < operator < 20e-6 and 0.02 < plan < 0.06
    told = next(row for row in rows if "flops" in row)
    bars = {(row["system"], row["link"], row["batch"]): row for row in rows if "ms" in row}
    one = bars["offload", "real", 20]
    lane = one["moved_bytes"] / one["ms"] * 1e3
    shape = ModelShape.of(models.published("OPT-13B"))

    def said(row: dict) -> dict:
        link = lane if row["link"] == "real" else min(predict.PUBLISHED_LINK, lane)
        machine = Machine(told["flops"], told["memory"], link)
        seconds = {"launches": operator * found.layer[row["system"]], "paged": row["link"] != "real"}
        bar = predict.bar(row["system"], machine, shape, row["prompt"], row["batch"], **seconds)
        return bar["step_ms"] + 1e3 * plan * PLANNED.get(row["system"], 0), bar["prefill_s"]

    # The host's moves go on while the fetch of the next layer does, so they take the fetch's place.
    alone = 1e3 * shape.layers * operator * found.layer["offload+h2o"]
    moves = bars["offload+h2o", "real", 20]["ms"] - alone
    held = 0.2 * (1920 + 64) * 20 * shape.kv_heads * shape.head_dim * 4 * shape.layers
    pageable = [row["gbps"] for row in units["link:copies"]["rows"] if row["what"] == "to device, pageable"][
        -1
    ]
    for (system, link, batch), row in bars.items():
        step, prefill = said(row)
        if system == "offload+h2o":
            step = moves + alone
        elif system == "uvm+h2o":
            step += moves + held / pageable / 1e6
        total = prefill + predict.STEPS * step / 1e3
        assert step == pytest.approx(row["ms"], rel=0.2), (system, link, batch)
        assert total == pytest.approx(row["total_s"], rel=0.2), (system, link, batch)


def operators_of(method: str) -> float:
    """Operators of a layer in an eager step of a Llama with a cache of transformers' own."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, StaticCache

    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=HF_LAYERS, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = (
        DynamicCache(config=config)
        if method == "hf-dynamic"
        else StaticCache(config=config, max_cache_len=64)
    )
    with torch.no_grad():
        for tokens in (20, 1):
            model(torch.ones(1, tokens, dtype=torch.long), past_key_values=cache)
    return launches.counted(model, cache, torch.ones(1, 1, dtype=torch.long))
