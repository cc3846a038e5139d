"""The store: atomic, resumable, honest about damage; the tables have the promised fields."""

from __future__ import annotations

import json
import math
import os
import time

import pytest

from eval.core.digests import digest
from eval.core.errors import Problem, one_line
from eval.core.machine import machine, versions
from eval.core.measurement import Cell
from eval.core.results import Store, write_json


def cell(method="full", task="recall", config=None, **more):
    metrics = [{"metric": "acc", "value": 0.5, "stderr": 0.1, "n": 4, "higher_is_better": True}]
    return {
        "model": "m",
        "method": method,
        "task": task,
        "config": config or {"limit": 4},
        "seconds": 1.0,
        "machine": machine(threads=1),
        "versions": versions(),
        "metrics": metrics,
        **more,
    }


@pytest.fixture
def store(tmp_path):
    lines = []
    made = Store(tmp_path / "deep" / "out", lines.append)
    made.prepare()
    made.lines = lines
    return made


def test_a_cell_comes_back_only_for_its_own_settings(store):
    store.save(cell(config={"limit": None, "pair": (1, 2)}))
    assert store.load(Cell("m", "full", "recall", {"limit": None, "pair": (1, 2)}))["metrics"]
    assert store.load(Cell("m", "full", "recall", {"limit": 4, "pair": (1, 2)})) is None
    assert store.load(Cell("m", "full", "chain", {"limit": None})) is None
    assert not store.lines


def test_names_do_not_collide(store):
    names = ("h2o:budget=0.2", "h2o_budget=0.2", "a/b", "a:b", "x" * 300)
    assert len({store.path("m", method, "t") for method in names}) == len(names)
    for method in names:
        store.save(cell(method))
    assert {found["method"] for found in store.records()} == set(names)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": "m"}', "\x00\x01"])
def test_a_damaged_cell_is_a_warning_and_is_made_again(store, text):
    store.save(cell())
    store.path("m", "full", "recall").write_text(text)
    assert store.load(Cell("m", "full", "recall", {"limit": 4})) is None
    assert list(store.records()) == []
    assert all("damaged cell" in line for line in store.lines)
    assert store.lines
    store.save(cell())
    assert store.load(Cell("m", "full", "recall", {"limit": 4}))


def test_writing_is_all_or_nothing(store, monkeypatch):
    path = store.out / "x.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    monkeypatch.setattr("eval.core.results.os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in store.out.glob(".writing*")] == []


def test_left_overs_of_a_killed_run_are_cleared(store):
    (store.cells / ".writing-abc.json").write_text("{")
    store.save(cell())
    assert len(list(store.records())) == 1
    (store.cells / ".writing-old.json").write_text("{")
    os.utime(store.cells / ".writing-old.json", (0, time.time() - 25 * 3600))
    store.prepare()
    left = [path.name for path in store.cells.glob(".writing-*")]
    assert left == [".writing-abc.json"]  # it may be a running process's


def test_numbers_that_are_not_json(store):
    write_json(store.out / "x.json", {"a": [math.nan, math.inf, 1.0]})
    assert json.loads((store.out / "x.json").read_text()) == {"a": [None, None, 1.0]}


def test_incomplete_cells_are_refused(store):
    with pytest.raises(ValueError, match="seconds"):
        store.save({"model": "m", "method": "full", "task": "t", "config": {}})


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Problem, match="cannot be written"):
        Store(tmp_path / "file" / "out").prepare()


def test_tables(store):
    row = dict.fromkeys(("context", "prefill_ms", "decode_ms", "decode_ms_min"), 1.0)
    store.save(cell())
    store.save(cell(task="speed:model:256", metrics=[], rows=[row]))
    summary, speed = store.write_tables()
    assert summary == json.loads((store.out / "summary.json").read_text())
    assert speed == json.loads((store.out / "speed.json").read_text())
    assert [set(one) for one in summary] == [{"model", "method", "task", "metric", "value", "stderr", "n"}]
    assert speed == [{"model": "m", "method": "full", **row}]


def test_digests_and_lines(tmp_path):
    (tmp_path / "a").write_text("1")
    first = digest([tmp_path])
    (tmp_path / "a").write_text("2")
    assert digest([tmp_path]) != first
    assert one_line("a\nb  c") == "a b c"
    assert len(one_line("x" * 1000)) == 300
    assert one_line(ValueError()) == "ValueError"
