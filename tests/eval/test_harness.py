"""The harness beside lm-eval's own model: the same answers, a speed for both."""

from eval.accuracy import taskset
from eval.studies.harness import compare


def test_a_row_for_each_task(folder):
    tasks = {"recall": taskset.prepared("recall", 0, 1234)}
    (row,) = compare(str(folder), tasks, 1, 2, 1, ("full", "int8"))
    assert row["task"] == "recall" and row["documents"] == 1
    ways = ["full, eager", "full, compiled", "int8, compiled"]
    assert list(row["cpu_seconds"]) == ["HFLM, 2 rows", "HFLM, 8 rows", *ways]
    assert {len(taken) for taken in row["cpu_seconds"].values()} == {1}
    speed = row["documents_per_second"]
    best = max(speed["HFLM, 2 rows"], speed["HFLM, 8 rows"])
    assert row["over_hflm"] == {way: speed[way] / best for way in ways}
    assert min(row["over_hflm"].values()) > 0
