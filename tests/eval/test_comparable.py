"""What differs in protocol, shots, limit, model or code never stands in one table, and a line says so."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from eval import report
from eval.core.comparable import comparable, differences
from eval.core.machine import machine, versions
from eval.core.measurement import Cell
from eval.core.results import Store

CONFIG = {"model": "aaa", "code": "ccc", "method": None, "limit": 4, "num_fewshot": None}
CONFIG |= {"protocol": "question-inside", "task": "ddd"}


def cell(method="full", task="recall", made="2026-01-01", value=0.5, **config):
    row = {"metric": "acc", "value": value, "stderr": 0.1, "n": 4, "higher_is_better": True}
    held = {"device_bytes": 8.0, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 1}
    stands = {"machine": machine(threads=1), "versions": versions(), "seconds": 1.0, "made": made}
    found = {"metrics": [row], "values": {"acc": [value] * 4}, "bytes": held}
    return {"model": "m", "method": method, "task": task, "config": CONFIG | config} | stands | found


def names(cells) -> set[str]:
    return {f"{one['method']} on {one['task']}" for one in cells}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("protocol", "question-outside", "protocol question-outside, not question-inside"),
        ("num_fewshot", 5, "shots 5, not none"),
        ("limit", None, "limit none, not 4"),
        ("model", "bbb", "model bbb, not aaa"),
        ("code", "old", "code old, not ccc"),
        ("dtype", "bfloat16", "dtype bfloat16, not none"),
        ("task", "other rows", "data other rows, not ddd"),
    ],
)
def test_a_cell_made_otherwise_is_left_out(key, value, said, tmp_path):
    """The newest cell says what the tables are about; the other is in no table, file or mean."""
    store = Store(tmp_path)
    store.prepare()
    other = cell("int4", value=0.25)
    other["config"][key] = value
    store.save(other)
    store.save(cell("full", made="2026-02-02"))
    out = io.StringIO()
    report.write(store, console=Console(file=out, width=80))
    printed, page = out.getvalue(), (tmp_path / "report.html").read_text()
    line = f"left out, made under other settings: int4 on recall ({said})"
    assert line in printed.splitlines()
    assert line in page and '<th scope="row">int4</th>' not in page
    assert {row["method"] for row in json.loads((tmp_path / "summary.json").read_text())} == {"full"}


def test_what_is_wanted_now_comes_before_what_is_newest():
    cells = [cell("full"), cell("int4"), cell("int8", made="2026-02-02", limit=8)]
    kept, lines = comparable(cells)
    assert names(kept) == {"int8 on recall"} and "full on recall, int4 on recall (limit 4" in lines["m"]
    kept, lines = comparable(cells, [Cell("m", "int4", "recall", CONFIG)])
    assert (
        names(kept) == {"full on recall", "int4 on recall"}
        and "int8 on recall (limit 8, not 4)" in lines["m"]
    )


def test_methods_of_ones_own_and_other_tasks_stand_together():
    cells = [cell(), cell("mine.Keep"), cell("full", "chain")]
    cells[1]["config"]["method"], cells[2]["config"]["task"] = "123", "eee"
    assert comparable(cells) == (cells, {})


def test_speed_stands_beside_accuracy_of_the_same_model_only():
    accuracy = [cell(), cell("int4")]
    speed = [cell(task="speed:model:256", repeats=2, code="its own"), cell(task="speed:model:512", repeats=1)]
    speed[1]["made"] = "2025"
    kept, lines = comparable(accuracy + speed)
    assert names(kept) == {"full on recall", "int4 on recall", "full on speed:model:256"}
    assert "full on speed:model:512 (code ccc, not its own, repeats 1, not 2)" in lines["m"]
    other = cell(task="speed:model:256", repeats=2, model="bbb", made="2025")
    kept, lines = comparable([*accuracy, other])
    assert names(kept) == {"full on recall", "int4 on recall"} and "(model bbb, not aaa)" in lines["m"]
    other["model"] = "another"  # a board of its own
    assert names(comparable([*accuracy, other])[0]) == {*names(accuracy), "full on speed:model:256"}


def test_many_cells_are_one_line():
    old = [cell(method, code="old") for method in ("full", "int8", "int4", "fp8")]
    _, lines = comparable([*old, cell("h2o", made="2026-02-02")])
    assert lines["m"].endswith("full on recall, int8 on recall and 2 more (code old, not ccc)")


def test_differences_are_those_of_what_is_stored():
    assert differences({"pair": [1, 2]}, {"pair": (1, 2)}) == {}
    assert differences({"a": 1, "b": 2}, {"b": 3, "c": None}) == {"b": (2, 3), "a": (1, None)}


def test_cells_of_other_code_are_shown_where_they_are_asked_for(tmp_path):
    """Marked, and named beneath; what differs in anything else stays out."""
    store = Store(tmp_path)
    store.prepare()
    store.save(cell("full", made="2026-02-02"))
    store.save(cell("int4", code="old"))
    store.save(cell("int8", code="old", limit=2))
    out = io.StringIO()
    report.write(store, console=Console(file=out, width=80), any_code=True)
    printed = " ".join(out.getvalue().split())
    assert "50.0†" in printed and "compared with the rest: int4 on recall (old)" in printed
    assert (
        "left out, made under other settings: int8 on recall (code old, not ccc, limit 2, not 4)" in printed
    )
    page = (tmp_path / "report.html").read_text()
    assert '<th scope="row">int4</th>' in page and '<th scope="row">int8</th>' not in page
