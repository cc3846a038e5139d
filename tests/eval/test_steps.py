"""Peers: every row steps the same model, what is stored is what is shown; nothing is asserted of times."""

from __future__ import annotations

import json

import pytest
import torch

import kvlab
from eval.__main__ import main
from eval.report import steps as report
from eval.reproduce import collect, tables
from eval.speed import llama, peers, steps

COARSE = {"f32": 2e-3, "f16": 2e-3, "q8_0": 0.05, "q4_0": 0.5}  # flash attention keeps K and V in fp16
built = pytest.mark.skipif(not llama.there(), reason="llama.cpp is not built in .llama")


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A folder with a Llama of grouped heads and odd sizes, as far as llama.cpp's blocks of 32 allow."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101, hidden_size=96, intermediate_size=104, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=500.0,
        tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(steps, "read_bandwidth", lambda seconds: 1e10)
    monkeypatch.setattr(steps, "baselines", lambda: ["hf-dynamic", "hf-static", "hf-quantized"])
    monkeypatch.setattr(steps, "OURS", ("full", "int8", "h2o:budget=0.2"))


def test_a_run_from_the_command_line(llama_folder, quick, tmp_path, monkeypatch, capsys):
    """Without llama.cpp, which a line says; what is collected is what documents show."""
    monkeypatch.setattr(llama, "there", lambda: False)
    words = ["steps", "--models", str(llama_folder), "--out", str(tmp_path / "out")]
    assert main([*words, "--contexts", "40", "--rounds", "2"]) == 0
    assert "llama.cpp is left out" in capsys.readouterr().err
    monkeypatch.setattr(peers, "FILE", tmp_path / "speed.json")
    monkeypatch.setattr(tables, "DOCUMENTS", ())
    assert main([*words, "--collect"]) == 0
    rows = collect.read(tmp_path / "speed.json")
    assert {row["engine"] for row in rows} == {"transformers", "kvlab, eager", "kvlab, compiled"}
    full = [row for row in rows if row["method"] in ("full", "hf-dynamic", "hf-static")]
    assert all(row["off"] < 1e-5 for row in full) and all(
        row["off"] > 0 for row in rows if row["method"] == "int8"
    )
    for row in rows:
        assert row["cpu_ms_low"] <= row["cpu_ms"] <= row["cpu_ms_high"]
        assert row["steps"] == 2 * steps.TIMED and row["context"] == 40
        assert row["fraction"] == pytest.approx(row["gbps"] / 10, rel=1e-4)
    per_token = 2 * 2 * 2 * 32 * 4
    assert {row["bytes"] for row in rows if row["method"] == "hf-dynamic"} == {40 * per_token}
    head, body = report.times(rows, str(llama_folder), "1")
    assert head[1:] == ["40 tokens"] and len(body) == 3 + 6


def test_too_many_steps_are_refused(tmp_path, capsys):
    assert main(["steps", "--contexts", "64", "--rounds", "8", "--out", str(tmp_path)]) == 2
    assert "at least 65" in capsys.readouterr().err


def row(method: str, cpu: float, wall: float, engine: str = "llama.cpp", threads: int = 1) -> dict:
    times = {
        f"{clock}_ms{part}": ms
        for clock, ms in (("cpu", cpu), ("wall", wall))
        for part in ("", "_low", "_high")
    }
    return {"model": "m", "context": 9, "engine": engine, "method": method, "threads": threads} | times


def test_the_faster_way_to_attend_counts():
    rows = [row("f32, flash off", 2.0, 3.0), row("f32, flash on", 4.0, 1.0)]
    rows += [row("f32, flash off", 2.0, 3.0, threads=2), row("f32, flash on", 4.0, 1.0, threads=2)]
    rows += [row("full", 3.0, 2.0, "kvlab, compiled"), row("full", 3.0, 2.0, "kvlab, compiled", 2)]
    assert report.times(rows, "m", "1")[1][0] == ["llama.cpp: f32", "2.00 (2.00–2.00)"]
    assert report.times(rows, "m", "2")[1][0] == ["llama.cpp: f32", "1.00 (1.00–1.00)"]
    assert report.ratios(rows, "1")[1][0][1:] == ["1.50"] and report.ratios(rows, "2")[1][0][1:] == ["2.00"]
    assert report.ratios(rows, "1")[1][1][1:] == ["–"]  # nothing was measured of it


def test_what_a_step_grows_with(tmp_path):
    def measured(cpu, wall=1.0, threads=1, context=256, batch=1, layers=8, shape=()):
        more = {"model": "workshop", "context": context, "batch": batch, "layers": layers, "shape": [*shape]}
        return row("full", cpu, wall, "kvlab, compiled", threads) | more

    rows = [measured(3.0), measured(9.0, 4.0, 2), measured(5.0, context=2048)]
    rows += [measured(4.0, batch=2, shape=["batch=2"]), measured(7.0, 6.0, 2, batch=2, shape=["batch=2"])]
    rows += [measured(6.0, layers=16, shape=["layers=16"])]
    expected = {
        "context": [(256, 3.0), (2048, 5.0)], "batch": [(1, 3.0), (2, 4.0)], "layers": [(8, 3.0), (16, 6.0)],
        "threads": [(1, 1.0), (2, 4.0)],
    }  # fmt: skip
    for what, points in expected.items():
        assert report.growth(rows, what) == {"kvlab, compiled: full": points}
    assert report.times(rows, "workshop", "1")[1] == [
        ["kvlab, compiled: full", "3.00 (3.00–3.00)", "5.00 (5.00–5.00)"]
    ], "tables are of one row and the model's own layers"
    report.draw(rows[:1], tmp_path)
    assert not [*tmp_path.iterdir()]
    report.draw(rows, tmp_path)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("batch, layers", [(3, None), (1, 3)])
def test_a_padded_batch_and_another_number_of_layers(batch, layers, llama_folder, quick):
    bench = steps.Bench(str(llama_folder), 64, batch, layers)
    rows = bench.rows(4)
    assert {row.method for row in rows} == set(steps.FEW) and len(rows) == 5
    assert bench.shape.layers == (layers or 2)
    ids, logits = torch.arange(1, 9)[None], []
    right = steps.fed(bench.theirs, bench.their_cache("hf-dynamic", 0), ids)
    for row in rows:
        off = (row.logits(ids) - right).abs().max() / right.abs().max()
        assert off < (0.05 if row.method == "int8" else 1e-5)
        torch.manual_seed(3)
        run = row.make(44)
        run.step()
        logits.append(run.step()[:, -1])
    assert logits[0].shape[0] == batch and all(len(each) == batch for each in logits)
    cache = kvlab.make_cache(bench.ours["eager"], "full")
    steps.fill(cache, bench.shape, 40, bench.padding(40))
    assert cache.lengths == [40 - steps.PADDING * i for i in range(batch)]
    bench.close()


@built
def test_llama_computes_the_same_model(llama_folder, quick):
    bench = steps.Bench(str(llama_folder), 64)
    ids = torch.randint(0, 101, (1, 24), generator=torch.Generator().manual_seed(1))
    right = steps.fed(bench.theirs, bench.their_cache("hf-dynamic", 0), ids)
    rows = [row for row in bench.rows(0) if row.engine == "llama.cpp"]
    assert len(rows) == 6
    for row in rows:
        off = (row.logits(ids) - right).abs().max() / right.abs().max()
        assert off < (1e-5 if row.method == "f32, flash off" else COARSE[row.method.split(",")[0]]), (
            row.method
        )
    bench.close()


@built
def test_a_filled_cache_is_attended_to_whole(llama_folder):
    """Two chunks that hold the same tokens are as one, with every weight halved: the same logits; a third
    that holds others is not."""
    bench = steps.Bench(str(llama_folder), 64)
    found = []
    for tokens in (llama.CHUNK, 2 * llama.CHUNK):
        context = llama.Context(bench.llama, "f32", False, tokens + 8, 1)
        for chunk in range(tokens // llama.CHUNK):
            context._decode([1 + i % 97 for i in range(llama.CHUNK)], 0, chunk)
            if chunk:
                context.api.llama_memory_seq_cp(context.memory, chunk, 0, -1, -1)
        context.position = llama.CHUNK
        context.feed([1])
        found.append(context.logits(101))
        context.close()
    filled = llama.Context(bench.llama, "f32", False, 2 * llama.CHUNK, 1)
    filled.fill(2 * llama.CHUNK)
    filled.feed([1])
    other = filled.logits(101)
    filled.close()
    bench.close()
    scale = found[0].abs().max()
    assert 0 < (found[0] - found[1]).abs().max() / scale < 0.02  # the new token's own weight is halved too
    assert (other - found[1]).abs().max() / scale > 1e-3


def test_what_is_stored_is_json(tmp_path):
    assert json.loads(collect.text("speed", "about", [row("f32, flash on", 1.0, 2.0)]))["study"] == "speed"
