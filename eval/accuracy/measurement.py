"""The measurement `accuracy`: a cell is one method on one task of lm-eval, or its agreement with full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..core import workers
from ..core.digests import digest
from ..core.errors import Failed
from ..core.machine import cores
from ..core.measurement import Cell, OfMethods, count, natural, option
from ..core.numbers import shown
from . import taskset

PROTOCOL = "question-inside"  # a prompt is compressed with its question; see lm.py
HEAVY = ("prose", "agreement", "needle_em", "needle", "chain")  # local tasks that take longest go first


@dataclass(kw_only=True)
class Accuracy(OfMethods):
    """Methods that miss a task are scored on it together, since they share their prefills; tasks go to worker
    processes, the longest first."""

    name = "accuracy"
    about = "lm-eval tasks and agreement with the full cache, then the report"
    maker = "eval.accuracy.make"

    tasks: tuple[str, ...] = option(
        "local tasks, 'agreement', or lm-eval's own by name", (), many=True, metavar="TASK"
    )
    batch_size: int = option("rows decoded together (default: 64)", 64, type=count)
    num_fewshot: int | None = option("shots, for tasks that do not fix them", type=natural)
    seed: int = option("of the choice of shots (default: 1234)", 1234, type=natural)
    jobs: int | None = option("processes (0: this one; default: 2 for a small model)", type=natural)

    @property
    def threads(self) -> int | None:
        return 1 if self.small() else None

    def check(self) -> None:
        super().check()
        if self.jobs is None and self.model is None:
            workers.get_ready()  # workers' imports begin while digests are made
        self.tasks = tuple(taskset.check(self.tasks or [*taskset.local_names(), taskset.AGREEMENT]))

    def cells(self) -> list[Cell]:
        settings = {"protocol": PROTOCOL, "num_fewshot": self.num_fewshot, "seed": self.seed}
        return [
            Cell(
                self.model_name,
                spec.text,
                task,
                self.configuration(self.maker, spec=spec, task=digest(taskset.files(task)), **settings),
            )
            for task in self.tasks
            for spec in self.specs
        ]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        wanted = {(cell.task, cell.method): cell for cell in cells}
        jobs = [(task, tuple(c.method for c in cells if c.task == task)) for task in self.tasks]
        jobs = [(task, methods) for task, methods in jobs if methods]
        jobs.sort(key=lambda job: HEAVY.index(job[0]) if job[0] in HEAVY else len(HEAVY))
        processes = self.jobs if self.jobs is not None else min(2, cores()) if self.small() else 0

        def report(job, done: int, total: int) -> None:
            bar.at(job[0], len(job[1]) * min(1.0, done / max(total, 1)))

        for job, found in workers.run(self.maker, self, jobs, processes, self.threads, report):
            task, methods = job
            for method in methods:
                one = found if isinstance(found, Failed) else found[method]
                yield wanted[task, method], one
            bar.at(task, len(methods))

    def result(self, found: dict) -> str:
        return shown(found["metrics"][0])

    def write(self, store, show, wanted: list[Cell]) -> None:
        from .. import report

        report.write(store, wanted)
