"""Jobs are cut by method where the last one then ends sooner, by measured cells, and nowhere else."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.__main__ import main
from eval.cluster.cut import cut, measured, planned, wall
from eval.core.results import Store
from eval.core.workers import Local

METHODS = tuple(f"m{number}" for number in range(8))


def cells(prefill: dict[str, float], own: float = 10.0) -> list[dict]:
    return [
        {"model": "m", "task": task, "method": method, "seconds": own, "prefill_seconds": seconds}
        for task, seconds in prefill.items()
        for method in METHODS[:2]
    ]


def end(jobs, workers, known) -> float:
    return wall((known["m", task].of(methods) for task, methods in jobs), workers)


def test_a_job_takes_its_prefill_once_and_what_each_method_takes():
    known = measured([*cells({"a": 30.0}), {"model": "m", "task": "a", "method": "", "seconds": 1e6}])
    assert known["m", "a"].of(METHODS[:1]) == 40.0
    assert known["m", "a"].of(METHODS) == 110.0  # those that were not measured as the others on average


@pytest.mark.parametrize(
    ("prefill", "workers", "pieces"),
    [
        ({"a": 1.0}, 1, 1),  # nobody else is there
        ({"a": 1.0}, 2, 2),
        ({"a": 1.0}, 64, 8),  # one method each
        ({"a": 1000.0}, 64, 8),  # sooner by a second or by an hour
        ({"a": 1.0, "b": 1.0}, 2, 2),  # even as they are
        ({"a": 1.0, "b": 1.0, "c": 1.0}, 2, 4),
    ],
)
def test_jobs_are_cut_where_they_end_sooner(prefill, workers, pieces):
    whole = [(task, METHODS) for task in prefill]
    known = measured(cells(prefill))
    found = planned(whole, workers, "m", cells(prefill))
    assert len(found) == pieces
    done = Counter((task, method) for task, methods in found for method in methods)
    assert done == Counter((task, method) for task, methods in whole for method in methods)
    if pieces > len(whole):
        assert end(found, workers, known) < end(whole, workers, known)


def test_a_cut_that_costs_more_than_it_saves_is_not_made():
    """Of two jobs on three workers the pieces would be four, two of them one after the other."""
    whole = [("a", METHODS), ("b", METHODS)]
    assert planned(whole, 3, "m", cells(dict.fromkeys("ab", 500.0))) == whole
    assert len(planned(whole, 3, "m", cells(dict.fromkeys("ab", 5.0)))) > 2


def test_the_longest_goes_first_and_what_was_not_measured_is_left():
    prefill = {"a": 10.0, "b": 20.0}
    assert [task for task, _ in cut([("a", ("x",)), ("b", ("x",))], 1, lambda job: prefill[job[0]])] == [
        "b",
        "a",
    ]
    jobs = [("a", METHODS), ("new", METHODS)]
    assert planned(jobs, 64, "m", cells(prefill)) == jobs
    assert planned([("a", METHODS)], 64, "other", cells(prefill)) == [("a", METHODS)]


def test_a_sweep_cuts_by_the_cells_that_its_folder_holds(folder, tmp_path, monkeypatch):
    """And finds the same numbers in pieces: digit by digit what one job gives."""
    words = ["accuracy", "--model", str(folder), "--limit", "2", "--tasks", "recall", "--out", str(tmp_path)]
    assert main([*words, "--methods", "full", "--jobs", "0"]) == 0
    seen = []

    def run(self, maker, options, jobs, report):
        seen.append(jobs(3))
        for job in seen[-1]:
            yield from Local.run(Local(0, 1), maker, options, lambda workers, job=job: [job], report)

    with monkeypatch.context() as patch:
        patch.setattr("eval.accuracy.measurement.workers.Local", lambda *how: Pieces(run))
        assert main([*words, "--methods", "full", "int8", "int4", "sinks:budget=0.5"]) == 0
    assert sorted(map(len, (methods for _, methods in seen[0]))) == [1, 1, 1]
    pieces = {cell["method"]: cell["values"] for cell in Store(tmp_path).records()}
    other = tmp_path / "other"
    words[-1] = str(other)
    assert main([*words, "--methods", "full", "int8", "int4", "sinks:budget=0.5", "--jobs", "0"]) == 0
    assert {cell["method"]: cell["values"] for cell in Store(other).records()} == pieces


class Pieces:
    def __init__(self, run):
        self.run = lambda *how: run(self, *how)
