"""Peers: every row steps the same model, what is stored is what is shown; nothing is asserted of times."""

from __future__ import annotations

import json

import pytest
import torch

from eval.__main__ import main
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


def test_what_a_run_measures(monkeypatch):
    monkeypatch.setattr(steps, "named", str)  # SmolLM2 may not have been fetched here
    monkeypatch.setattr(steps, "model_digest", str)
    asked = steps.Steps()
    tasks = {(cell.model, cell.task) for cell in asked.cells()}
    assert len(tasks) == len(asked.cells()) == 4 + 4 + 1 + 4 + 4 + 2
    assert {("workshop", "steps:weights=bf16:256"), ("smollm2", "steps:prompt:8192")} <= tasks
    monkeypatch.setattr(llama, "there", lambda: True)
    assert not asked.notes()


def test_too_many_steps_are_refused(tmp_path, capsys):
    assert main(["steps", "--contexts", "64", "--rounds", "8", "--out", str(tmp_path)]) == 2
    assert "at least 65" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_said_once(tmp_path, capsys):
    assert main(["steps", "--models", "workshop", "NONESUCH", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "no configuration could be loaded from 'NONESUCH'" in said[0]


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


@built
@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_llama_with_narrow_weights(weights, tmp_path):
    """Nearly the same logits, of fewer bytes; both say how their weights are held."""
    folder = saved(tmp_path, intermediate_size=64, tie_word_embeddings=True)
    bench = turns.Bench(str(folder), 64, weights=weights)
    rows = bench.rows()
    assert [row.engine for row in rows[-3:]] == [f"kvlab, compiled, {weights} weights"] * 3
    theirs = llama.OF_WEIGHTS[weights]
    assert {row.engine for row in rows[:-3]} == {f"llama.cpp, {theirs} weights"} and len(rows) == 9
    numbers = sum(p.numel() for p in bench.theirs.parameters() if p.dim() > 1)
    norms = 4 * sum(p.numel() for p in bench.theirs.parameters() if p.dim() == 1)
    per_weight = {"bf16": 2, "q8_0": 34 / 32}[theirs]
    assert rows[0].weights == (theirs, numbers * per_weight + norms)
    ids = torch.arange(1, 20)[None]
    right = bench.theirs(ids).logits[0, -1]
    for row in rows:
        if row.method in ("f32, flash off", "full"):
            off = (row.logits(ids) - right).abs().max() / right.abs().max()
            assert 1e-5 < off < 0.03
    bench.close()


@built
def test_a_prompt_of_several_chunks(tmp_path):
    bench = turns.Bench(str(saved(tmp_path)), 2 * llama.CHUNK)
    ids = bench.ids(llama.CHUNK + 9)
    right = bench.theirs(ids).logits[0, -1]
    row = bench.of_llama("f32", False)
    turns.fed(row, 1, ids)
    assert row.run.position == row.run.held == llama.CHUNK + 9
    row.run.close()
    off = row.logits(ids) - right
    assert off.abs().max() < 1e-4 * right.abs().max()
    bench.close()


def test_a_type_that_cannot_hold_a_model(llama_folder, tmp_path):
    """104 weights in a row are no whole blocks."""
    model = turns.loaded(str(llama_folder), 64)
    assert llama.holds(model, "bf16") and not llama.holds(model, "q8_0")
    pytest.importorskip("gguf")
    with pytest.raises(ValueError, match="q8_0 holds rows of a multiple of 32"):
        llama.write(model, tmp_path / "model.gguf", "q8_0")
    assert turns.Bench(str(llama_folder), 64, weights="int8").llama is None


@built
def test_a_filled_cache_is_attended_to_whole(llama_folder):
    """Two chunks that hold the same tokens are as one, with every weight halved: the same logits; a third
    that holds others is not."""
    bench = turns.Bench(str(llama_folder), 64)
    found = []
    for tokens in (llama.CHUNK, 2 * llama.CHUNK):
        context = llama.Context(bench.llama, bench.shape, "f32", False, tokens + 8, 1)
        for chunk in range(tokens // llama.CHUNK):
            context._decode([1 + i % 97 for i in range(llama.CHUNK)], 0, chunk)
            if chunk:
                context.api.llama_memory_seq_cp(context.memory, chunk, 0, -1, -1)
        context.position = llama.CHUNK
        found.append(context.feed(torch.ones(1, 1, dtype=torch.long)))
        context.close()
    filled = llama.Context(bench.llama, bench.shape, "f32", False, 2 * llama.CHUNK, 1)
    filled.fill(2 * llama.CHUNK)
    other = filled.feed(torch.ones(1, 1, dtype=torch.long))
    filled.close()
    bench.close()
    scale = found[0].abs().max()
    assert 0 < (found[0] - found[1]).abs().max() / scale < 0.02  # the new token's own weight is halved too
    assert (other - found[1]).abs().max() / scale > 1e-3
