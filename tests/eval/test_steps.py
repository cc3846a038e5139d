"""Peers: every row steps the same model, what is stored is what is shown; nothing is asserted of times."""

from __future__ import annotations

import json

import pytest
import torch

from eval.command import main
from eval.core.results import FIELDS
from eval.reproduce import collect, documents, llama, steps, tables, timed, turns

COARSE = {"f32": 2e-3, "f16": 2e-3, "q8_0": 0.05, "q4_0": 0.5}  # flash attention keeps K and V in fp16
built = pytest.mark.skipif(not llama.there(), reason="llama.cpp is not built in .llama")


WEIGHTS = 101 * 96 + 2 * (4 * 96 * 128 - 2 * 96 * 64 + 3 * 96 * 104)  # that a step reads, but for norms


def saved(folder, **changes):
    """A Llama of grouped heads and odd sizes, as far as llama.cpp's blocks of 32 allow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 101, "hidden_size": 96, "intermediate_size": 104, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": False,
    }  # fmt: skip
    LlamaForCausalLM(LlamaConfig(**sizes | changes)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(turns, "read_bandwidth", lambda seconds: 1e10)
    monkeypatch.setattr(turns, "baselines", lambda: ["hf-dynamic", "hf-static", "hf-quantized"])
    monkeypatch.setattr(turns, "OURS", ("full", "int8", "h2o:budget=0.2"))
    monkeypatch.setattr(turns, "PROMPT_ROUNDS", 2)


def test_a_run_from_the_command_line(llama_folder, quick, tmp_path, monkeypatch, capsys):
    """Without llama.cpp, which a line says; what is collected is what documents show."""
    monkeypatch.setattr(llama, "there", lambda: False)
    words = ["steps", "--models", str(llama_folder), "--out", str(tmp_path / "out")]
    assert main(words := [*words, "--contexts", "40", "--rounds", "2"]) == 0
    assert "llama.cpp is left out" in capsys.readouterr().err
    made = {path.name for path in (tmp_path / "out" / "cells").glob("*.json")}
    (tmp_path / "out" / "cells" / "another.json").write_text(
        json.dumps({name: {} for name in FIELDS} | {"model": "m", "method": "full", "task": "recall"})
    )
    monkeypatch.setattr(documents, "RESULTS", tmp_path)
    monkeypatch.setattr(documents, "DOCUMENTS", ())
    assert main([*words, "--collect"]) == 0
    rows = collect.read(tmp_path / "speed.json")
    assert made and all(row["context"] == 40 for row in rows)  # of what is asked for alone
    asked = steps.Steps(models=(str(llama_folder),), contexts=("40",), rounds=2)
    before = [cell.config for cell in asked.cells()]
    with monkeypatch.context() as built:
        built.setattr(llama, "there", lambda: True)
        assert all(new.config not in before for new in asked.cells())  # then llama.cpp is measured
    assert {(row["engine"], *row["shape"]) for row in rows} == {
        ("transformers",), ("kvlab, eager",), ("kvlab, compiled",),
        ("kvlab, compiled, bf16 weights", "weights=bf16"), ("kvlab, compiled, int8 weights", "weights=int8"),
        ("transformers", "prompt"), ("kvlab, compiled", "prompt"),
    }  # fmt: skip
    for row in rows:
        each = {"fp32": 4, "bf16": 2, "int8": 1}[row["weights"]]
        assert row["weight_bytes"] == pytest.approx(each * WEIGHTS, rel=0.1)
    for row in rows:
        if "prompt" in row["shape"]:
            assert row["steps"] == 2 and "fraction" not in row and row["context"] == 40
    all_rows, rows = rows, [row for row in rows if "prompt" not in row["shape"]]
    full = [row for row in rows if row["weights"] == "fp32"]
    full = [row for row in full if row["method"] in ("full", "hf-dynamic", "hf-static")]
    assert all(row["off"] < 1e-5 for row in full) and all(
        row["off"] > 0 for row in rows if row["method"] == "int8"
    )
    for row in rows:
        assert row["cpu_ms_low"] <= row["cpu_ms"] <= row["cpu_ms_high"]
        assert row["steps"] == 2 * turns.TIMED and row["context"] == 40
        assert row["fraction"] == pytest.approx(row["gbps"] / 10, rel=1e-4)
    per_token = 2 * 2 * 2 * 32 * 4
    assert {row["bytes"] for row in rows if row["method"] == "hf-dynamic"} == {40 * per_token}
    monkeypatch.setattr(tables, "study", lambda name: all_rows)
    monkeypatch.setattr(timed, "LEVELS", (rows[0]["simd"],))
    table = timed.speed("times", str(llama_folder), "1").splitlines()
    assert table[0].endswith("| 40 tokens |") and len(table) == 2 + 3 + 6 + 2
    table = timed.speed("times", str(llama_folder), "1", "weights").splitlines()
    assert len(table) == 2 + 2 * len(turns.NARROW) + 2 and "weights in bf16 (" in table[-1]


@built
def test_llama_computes_the_same_model(llama_folder, quick):
    bench = turns.Bench(str(llama_folder), 64)
    ids = torch.randint(0, 101, (1, 24), generator=torch.Generator().manual_seed(1))
    right = bench.theirs(ids).logits[0, -1]
    rows = [row for row in bench.rows() if row.engine == "llama.cpp"]
    assert len(rows) == 6
    for row in rows:
        off = (row.logits(ids) - right).abs().max() / right.abs().max()
        assert off < (1e-5 if row.method == "f32, flash off" else COARSE[row.method.split(",")[0]]), (
            row.method
        )
    bench.close()
