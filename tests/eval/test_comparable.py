"""Protocols are side by side; other settings have tables of their own; other models and code are left out."""

import json

import pytest
import stored
from stored import reported, store_of

from eval.accuracy.accuracy import Accuracy
from eval.core.comparable import comparable
from eval.core.measurement import Cell
from eval.core.results import Store
from eval.report import tables
from eval.speed.speed import Speed
from eval.studies.measurements import Perplexity

CONFIG = {"model": "aaa", "code": "ccc", "method": None, "limit": 4, "num_fewshot": None}
CONFIG |= {"protocol": "question-inside", "task": "ddd"}


def cell(method="full", task="recall", made="2026-01-01", value=0.5, **config):
    return stored.cell(method, task, [value] * 4, config=CONFIG | config, made=made)


def names(cells) -> set[str]:
    return {f"{one['method']} on {one['task']}" for one in cells}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model", "bbb", "model bbb, not aaa"),
        ("code", "old", "code old, not ccc"),
        ("task", "other rows", "data other rows, not ddd"),
    ],
)
def test_a_cell_made_otherwise_is_left_out(key, value, said, tmp_path):
    """The newest cell says what the tables are about; the other is in no table, file or mean."""
    other = cell("int4", value=0.25)
    other["config"][key] = value
    store = store_of(tmp_path, [other, cell("full", made="2026-02-02")])
    printed, page, *_ = reported(store, width=80)
    line = f"left out, made under other settings: int4 on recall ({said})"
    assert line in printed.splitlines()
    assert line in page and '<th scope="row">int4</th>' not in page
    assert {row["method"] for row in json.loads((tmp_path / "summary.json").read_text())} == {"full"}


@pytest.mark.parametrize(
    ("key", "value", "titles"),
    [
        ("num_fewshot", 5, ["shots none", "shots 5"]),
        ("limit", None, ["limit 4", "limit none"]),
        ("dtype", "bfloat16", ["dtype none", "dtype bfloat16"]),
        ("batch_size", 8, ["batch_size none", "batch_size 8"]),
    ],
)
def test_another_setting_has_a_table_of_its_own(key, value, titles, tmp_path):
    """The newest cell's table is first; every number of accuracy.csv says its setting."""
    other = cell("int4", value=0.25, **{key: value})
    printed, page, told, _ = reported(store_of(tmp_path, [other, cell("full", made="2026-02-02")]))
    assert [f"m, {title}\n" in printed for title in titles] == [True, True]
    assert printed.index(titles[0]) < printed.index(titles[1])
    assert all(f"kvlab · m: {title}" in page for title in titles)
    assert {row["method"]: row["differs"] for row in told} == {"full": "False", "int4": ""}
    assert len({row[key] for row in told}) == 2 and "left out" not in printed


def test_two_protocols_share_a_table(tmp_path):
    """Side by side, each compared with `full` under its own, bytes and figures apart."""
    first = {"protocol": "context-first", "evict": "once"}
    cells = [cell(), cell("int4", value=0.0), cell(value=1.0, **first), cell("int4", value=1.0, **first)]
    for one in cells:
        one["bytes"]["moved_bytes"] = 1.0  # nothing moved has no figure
    for one in cells[2:]:
        one["bytes"]["device_bytes"] = 4.0
    printed, page, told, _ = reported(store_of(tmp_path, cells))
    lines = [line.split() for line in printed.splitlines()]
    assert ["method", "acc", "acc"] in lines and ["int4", "100.0", "0.0*▼"] in lines
    assert ["context-", "question-"] in lines and ["first", "inside"] in lines
    assert "<small>context-first</small>recall<br><small>acc, n" in page
    assert {(row["protocol"], row["method"]): row["lost"] for row in told} == {
        ("question-inside", "full"): "", ("question-inside", "int4"): "",  # half right is not right or wrong
        ("context-first", "full"): "0", ("context-first", "int4"): "0",
    }  # fmt: skip
    names = {path.stem for path in tmp_path.glob("*.svg")}
    assert names == {f"accuracy-{of}{side}" for of in ("held", "moved") for side in ("", "-question-inside")}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert {row["protocol"] for row in summary} == {"question-inside", "context-first"}


def test_cells_of_other_code_are_shown_where_they_are_asked_for(tmp_path):
    """Marked, and named beneath; what differs in anything else stays out."""
    cells = [cell("full", made="2026-02-02"), cell("int4", code="old"), cell("int8", **{"model": "bbb"})]
    cells.append(cell("int8", code="old", task="chain", limit=2))
    printed, page, *_ = reported(store_of(tmp_path, cells), width=80, any_code=True)
    printed = " ".join(printed.split())
    assert "50.0†" in printed and "compared with the rest: int4 on recall (old)" in printed
    assert "left out, made under other settings: int8 on recall (model bbb, not aaa)" in printed
    assert "m, limit 2 " in printed and "int8 on chain (old)" in printed
    assert '<th scope="row">int4</th>' in page


def test_speed_stands_beside_accuracy_of_its_own_dtype():
    cells = [cell(made="2026-02-02"), cell(dtype="bfloat16")]
    speed = [cell(task="speed:model:256", dtype=dtype) | {"rows": []} for dtype in (None, "bfloat16")]
    kept, _ = comparable(cells + speed)
    found = tables.boards(kept)
    assert [board.setting for board in found] == ["dtype none", "dtype bfloat16"]
    assert [[c["config"].get("dtype") for c in board.cells] for board in found] == [
        [None] * 2,
        ["bfloat16"] * 2,
    ]


def test_what_is_wanted_now_comes_before_what_is_newest():
    cells = [cell("full"), cell("int4"), cell("int8", made="2026-02-02", limit=8)]
    apart = lambda kept: {one["method"]: one["apart"] for one in kept}
    kept, lines = comparable(cells)
    assert apart(kept) == {"full": {"limit": 4}, "int4": {"limit": 4}, "int8": {}} and not lines
    kept, lines = comparable(cells, [Cell("m", "int4", "recall", CONFIG)])
    assert apart(kept) == {"full": {}, "int4": {}, "int8": {"limit": 8}} and not lines


def test_times_of_two_machines_are_in_tables_of_their_own():
    speed = [cell("int8", "speed:model:256", machine="old, 1 cores", made="2025") | {"rows": []}]
    speed += [cell(task="speed:model:256", machine="new, 2 cores") | {"rows": []}]
    here, there = tables.boards(comparable([cell(protocol=None), *speed])[0])
    assert (here.methods, there.methods) == (["full"], ["int8"]) and here.tasks
    assert there.setting == "machine old, 1 cores"


def test_a_cell_says_that_a_gpu_made_it(monkeypatch):
    names = set()
    for there in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        asked = Accuracy(methods=("full",), tasks=("recall",), engine="eager"), Perplexity(methods=("full",))
        asked[0].check()
        names |= {Store.name(**vars(one)) for measurement in asked for one in measurement.cells()}
    assert len(names) == 4
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    for gpu in ("one", "another"):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device, gpu=gpu: gpu)
        timed = Speed(methods=("full",), device="cuda")
        timed.check()
        names |= {Store.name(**vars(one)) for one in timed.cells()[:1]}
    assert len(names) == 6


def test_speed_stands_beside_accuracy_of_the_same_model_only():
    accuracy = [cell(), cell("int4")]
    other = cell(task="speed:model:256", repeats=2, model="bbb", made="2025")
    kept, lines = comparable([*accuracy, other])
    assert names(kept) == {"full on recall", "int4 on recall"} and "(model bbb, not aaa)" in lines["m"]
    other["model"] = "another"  # a board of its own
    assert names(comparable([*accuracy, other])[0]) == {*names(accuracy), "full on speed:model:256"}
