"""Cut: a task's methods in several jobs, where by measured cells a sweep then ends sooner.

The methods of a job share its task's prefill, so a cut costs a prefill more, and pays where workers would
have nothing to do. What a job takes is known from cells of the same model and task that the run's folder
holds, those among them that are made again; a task of which it holds none leaves all jobs whole.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean

Job = tuple[str, tuple[str, ...]]  # a task, and methods


@dataclass
class Seconds:
    """What a task takes: `shared` once a job, and a method's own, `usual` where it was not measured."""

    shared: float = 0.0
    own: dict[str, float] = field(default_factory=dict)

    @property
    def usual(self) -> float:
        return fmean(self.own.values())

    def of(self, methods: Iterable[str]) -> float:
        usual = self.usual
        return self.shared + sum(self.own.get(method, usual) for method in methods)


def measured(cells: Iterable[dict]) -> dict[tuple[str, str], Seconds]:
    """{(model, task): seconds}, of cells that say their own seconds and those of the shared prefill."""
    found: dict[tuple[str, str], Seconds] = defaultdict(Seconds)
    for cell in cells:
        if "prefill_seconds" in cell:
            one = found[cell["model"], cell["task"]]
            one.shared = max(one.shared, cell["prefill_seconds"])
            one.own[cell["method"]] = cell["seconds"]
    return dict(found)


def wall(seconds: Iterable[float], workers: int) -> float:
    """Seconds until the last job is done: jobs go to the next free worker, the longest first."""
    jobs = sorted(seconds, reverse=True)
    free = [0.0] * max(1, min(workers, len(jobs)))
    for job in jobs:
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def cut(jobs: list[Job], workers: int, takes: Callable[[Job], float]) -> list[Job]:
    """The jobs, the longest first, of which some are cut by method where the last one then ends sooner.

    One piece more at a time is made of the job whose pieces are longest, as long as the workers' even share
    of all the work, which each cut adds to, stays below the best end found.
    """
    parts = dict.fromkeys(jobs, 1)
    pieces = {job: [job] for job in jobs}
    best, end = jobs, wall(map(takes, jobs), workers)
    while True:
        longest = max(parts, key=lambda job: max(map(takes, pieces[job])))
        task, methods = longest
        parts[longest] += 1
        if parts[longest] > len(methods):
            break
        pieces[longest] = [(task, methods[part :: parts[longest]]) for part in range(parts[longest])]
        found = [piece for job in jobs for piece in pieces[job]]
        seconds = [takes(piece) for piece in found]
        if sum(seconds) / workers >= end:
            break
        if (sooner := wall(seconds, workers)) < end:
            best, end = found, sooner
    return sorted(best, key=takes, reverse=True)


def planned(jobs: list[Job], workers: int, model: str, cells: Iterable[dict]) -> list[Job]:
    """`cut` by these cells; the jobs as they are where a task was not measured."""
    known = measured(cells)
    if not jobs or any((model, task) not in known for task, _ in jobs):
        return jobs
    return cut(jobs, workers, lambda job: known[model, job[0]].of(job[1]))
