"""The harness beside lm-eval's own model: the same answers, a speed for both."""

import json

from eval.accuracy import taskset
from eval.studies.harness import compare, difference


def test_how_far_answers_are_apart():
    assert difference([(1.0, True), (2.0, False)], [(1.0, True), (2.5, False)]) == 0.5
    assert difference(["a", "b"], ["a", "c"]) == 1.0 and difference([], []) == 0.0
    assert difference((-1.0, True), (-1.0, False)) == 1.0


def test_a_row_for_each_task(folder):
    tasks = {"recall": taskset.prepared("recall", 0, 1234)}
    (row,) = compare(str(folder), tasks, 1, 2, 1, ("full", "int8"))
    assert row["task"] == "recall" and row["documents"] == 1
    ways = ["full, eager", "full, compiled", "int8, compiled"]
    assert list(row["cpu_seconds"]) == ["HFLM, 2 rows", "HFLM, 8 rows", *ways]
    assert {len(taken) for taken in row["cpu_seconds"].values()} == {1}
    assert list(row["apart"]) == ways[:2] and max(row["apart"].values()) < 1e-3
    speed = row["documents_per_second"]
    best = max(speed["HFLM, 2 rows"], speed["HFLM, 8 rows"])
    assert row["over_hflm"] == {way: speed[way] / best for way in ways}
    assert min(row["over_hflm"].values()) > 0


def test_tokens_that_pass_are_counted(folder, tmp_path):
    """Of two answers to one question HFLM reads the question twice, kvlab once."""
    rows = [{"goal": "cool tea with ice and a long spoon", "sol1": "wait", "sol2": "boil it", "label": 0}]
    (tmp_path / "piqa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = taskset.Sources(data=(("piqa", str(tmp_path / "piqa.jsonl")),))
    tasks = {"piqa": taskset.prepared("piqa", 0, 1234, sources)}
    (row,) = compare(str(folder), tasks, 1, 8, 1, ("full",))
    assert row["tokens"]["full, eager"] < row["tokens"]["HFLM, 8 rows"] < 2 * row["tokens"]["full, eager"]
