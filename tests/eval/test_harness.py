"""The harness beside lm-eval's own model: the same answers, a speed for both."""

from eval.accuracy import taskset
from eval.studies.harness import apart, compare


def test_how_far_answers_are_apart():
    assert apart([(1.0, True), (2.0, False)], [(1.0, True), (2.5, False)]) == 0.5
    assert apart(["a", "b"], ["a", "c"]) == 1.0 and apart([], []) == 0.0
    assert apart((-1.0, True), (-1.0, False)) == 1.0


def test_a_row_for_each_task(folder):
    tasks = {"recall": taskset.prepared("recall", 0, 1234)}
    (row,) = compare(str(folder), tasks, 1, 2, 1, ("full", "int8"))
    assert row["task"] == "recall" and row["documents"] == 1
    ways = ["full, eager", "full, compiled", "int8, compiled"]
    assert list(row["cpu_seconds"]) == ["HFLM", *ways]
    assert {len(taken) for taken in row["cpu_seconds"].values()} == {1}
    assert list(row["apart"]) == ways[:2] and max(row["apart"].values()) < 1e-3
    speed = row["documents_per_second"]
    assert row["over_hflm"] == {way: speed[way] / speed["HFLM"] for way in ways}
    assert min(row["over_hflm"].values()) > 0
