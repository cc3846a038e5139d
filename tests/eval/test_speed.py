"""Speed: what is measured is what is said; no assertion on how fast anything is."""

import json

import pytest
import torch
from tiny import tiny
from transformers import LlamaConfig

from eval.command import main
from eval.core import workers
from eval.core.errors import Failed
from eval.core.measurement import Cell
from eval.report.tables import COLUMNS
from eval.speed import llama, speed, timing


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setitem(speed.CONTEXTS, "model", (32, 48))
    monkeypatch.setattr(speed, "REPEATS", 2)
    monkeypatch.setattr(speed, "baselines", lambda llama=False: ["hf-dynamic", "hf-static", "hf-quantized"])


def test_a_run_from_the_command_line(folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["speed", "--model", str(folder), "--out", str(out), "--jobs", "0"]
    methods = ["full", "recompute", "topk:budget=0.5"]
    assert main([*words, "--methods", *methods]) == 0
    rows = json.loads((out / "speed.json").read_text())
    assert {row["method"] for row in rows} == {*methods, *speed.baselines()}
    assert len(rows) == 2 * 6
    for row in rows:
        assert {"model", "method", "context", *(column.key for column in COLUMNS)} <= set(row)
        assert row["decode_ms_min"] <= row["decode_ms"] <= row["decode_ms_max"] or row["repeats"] == 2
        assert row["prefill_ms"] > 0
        assert 0 < row["fraction_of_bandwidth"]
    by = {(row["method"], row["context"]): row for row in rows}
    assert by["recompute", 48]["device_bytes"] == 0
    assert by["topk:budget=0.5", 48]["moved_bytes"] > 0
    per_token = 3 * 2 * 2 * 8 * 4
    assert by["full", 48]["device_bytes"] >= 48 * per_token
    assert by["hf-dynamic", 48]["device_bytes"] == 48 * per_token
    assert 49 * per_token <= by["hf-static", 48]["device_bytes"] < 50 * per_token
    assert by["hf-quantized", 48]["device_bytes"] < 0.3 * 49 * per_token
    capsys.readouterr()
    assert main([*words, "--methods", *methods, "int8"]) == 0
    assert "12 of 14 speed cells are kept" in capsys.readouterr().err


def test_the_engine_is_an_option_and_is_said(folder, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["speed", "--model", str(folder), "--out", str(out), "--jobs", "0", "--limit", "1"]
    assert main([*words, "--engine", "compiled", "--methods", "full"]) == 0
    rows = {row["method"]: row for row in json.loads((out / "speed.json").read_text())}
    assert rows["full"]["engine"] == "compiled" and rows["hf-dynamic"]["engine"] == "eager"
    narrow = [*words, "--weights", "int8", "--methods", "full"]
    assert main(narrow) != 0
    assert "--weights int8: the eager engine reads fp32 alone; add" in capsys.readouterr().err
    assert main([*narrow, "--engine", "compiled"]) == 0
    rows = {row["method"]: row for row in json.loads((out / "speed.json").read_text())}
    assert rows["full"]["engine"] == "compiled, int8 weights"


def test_workers_are_processes_that_say_what_went_wrong(folder):
    options = {"suite": "model", "model": str(folder), "device": "cpu", "dtype": None, "method": "full"}
    worker = workers.Worker("eval.speed.timing", options, threads=1)
    try:
        assert worker.finish() == "ready"
        about = worker.ask("about")
        assert about["token_bytes"] == 3 * 2 * 2 * 8 * 4
        assert worker.ask(32)["tokens_held"] == 32
        with pytest.raises(Failed, match="context"):
            worker.ask(4096)
        assert worker.ask(32)["tokens_held"] == 32
        worker.process.kill()
        with pytest.raises(Failed, match="ended by itself"):
            worker.ask(32)
    finally:
        worker.stop()
    broken = workers.Worker("eval.speed.timing", options | {"method": "h20"}, threads=1)
    with pytest.raises(Failed, match="h2o"):
        broken.finish()
    broken.stop()


def test_summary_by_hand():
    one = {
        "prefill_ms": 10.0,
        "steps_ms": [4.0, 2.0, 3.0],
        "device_bytes": 800,
        "host_bytes": 7,
        "moved_bytes": 100,
    }
    two = one | {"prefill_ms": 20.0, "steps_ms": [1.0, 1.0, 5.0]}
    repeats = [one | {"tokens_held": 10}, two | {"tokens_held": 10}]
    about = {"weight_bytes": 1000, "token_bytes": 50, "engine": "eager"}
    row = timing.summarize(64, repeats, about, bandwidth=1e6)
    assert row["decode_ms"] == 2.5 and row["waited"] == 0.0
    for waited, said in ((0.0, "2.50 ms per token"), (0.875, "2.50 ms per token, too slow: it waited 88 %")):
        assert speed.Speed().result({"rows": [row | {"waited": waited}]}).startswith(said)
    assert (row["decode_ms_min"], row["decode_ms_max"]) == (1.0, 3.0)
    assert row["prefill_ms"] == 15.0
    assert row["read_gbps"] == pytest.approx((1000 + 500 + 100) / 2.5e-3 / 1e9)
    assert row["fraction_of_bandwidth"] == pytest.approx((1000 + 500 + 100) / 2.5e-3 / 1e6)


SIZES = {  # of a Llama of grouped heads and odd sizes, as far as llama.cpp's blocks of 32 allow
    "vocab_size": 101, "hidden_size": 96, "intermediate_size": 104, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 500.0, "tie_word_embeddings": False,
}  # fmt: skip


def test_llama_cpp_is_timed_beside_models_that_it_reads(monkeypatch):
    """A Llama whose positions are rotated in the plain way, in weights that it can hold."""
    monkeypatch.setattr(llama, "there", lambda: True)
    config = LlamaConfig(**SIZES)
    assert llama.takes(config, "fp32") and llama.takes(config, "bf16") and not llama.takes(config, "int8")
    assert llama.takes(LlamaConfig(**SIZES | {"intermediate_size": 128}), "int8")
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert not llama.takes(LlamaConfig(**SIZES | {"rope_parameters": scaled}), "fp32")
    assert not llama.takes(tiny("mistral").config, "fp32") and speed.Speed(suite="wide").beside_llama()
    assert not speed.Speed(suite="wide", dtype="bfloat16").beside_llama()


@pytest.mark.skipif(not llama.there(), reason="llama.cpp is not built in .llama")
@pytest.mark.parametrize("kind, flash, most", [
    ("f32", False, 1e-5), ("f32", True, 2e-3), ("q8_0", True, 0.05), ("q4_0", True, 0.5),
])  # fmt: skip
def test_llama_cpp_computes_the_same_model(tmp_path, monkeypatch, kind, flash, most):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids = torch.randint(0, 101, (1, 24))
    with torch.no_grad():
        right = model(ids).logits[0, -1]
    read = llama.write(model, tmp_path / "model.gguf")
    assert read == pytest.approx(4 * (101 * 96 + 2 * (4 * 96 * 128 - 2 * 96 * 64 + 3 * 96 * 104)), rel=0.1)
    run = llama.Context(llama.Model(tmp_path / "model.gguf"), kind, flash, 40, 1)
    monkeypatch.setattr(llama, "CHUNK", 7)
    run.feed(ids[0, :-1].tolist())
    run.feed(ids[0, -1:].tolist())
    assert run.held == 24
    assert (run.logits(101) - right).abs().max() / right.abs().max() < most
    run.close()
    model.save_pretrained(tmp_path)
    flashed = "-flash" if flash and kind == "f32" else ""
    options = {"suite": "model", "model": str(tmp_path), "device": "cpu", "dtype": None}
    timed = timing.setup(options | {"method": f"llama-{kind}{flashed}"}, print)
    found = timed(48)
    assert (
        found["tokens_held"] == 48 and len(found["steps_ms"]) == 16 and timed("about")["weight_bytes"] == read
    )


def test_an_actor_makes_the_cells_of_a_context_as_a_machine_does(monkeypatch):
    asked = speed.Speed(on="ray", methods=("full",))
    cell = Cell("m", "full", "speed:model:256", {})

    def made(self, cells, bar):
        bar.at("full", 0.5)
        yield cells[0], self.on

    monkeypatch.setattr(speed.Speed, "made", made)
    assert speed.setup(asked, print)((cell,)) == [(cell, None)]
