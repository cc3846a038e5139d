"""Speed: what is measured is what is said; no assertion on how fast anything is."""

from __future__ import annotations

import json

import pytest

from eval.command import main
from eval.core import workers
from eval.core.errors import Failed
from eval.report.tables import COLUMNS
from eval.speed import speed, timing


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
