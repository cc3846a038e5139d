"""Speed cells: which are wanted, which are there, and measuring the others.

A cell is one method at one context. Nothing else runs meanwhile. The processes of all methods live
together and their repeats are interleaved; only a model too large to be loaded that often (see
Settings.small) is timed method by method. A cell is stored when its last repeat is in.
"""

from __future__ import annotations

import time

from . import workers
from .machine import HERE, code_digest, cores, digest, model_digest
from .results import SPEED, Store
from .run import Settings, record
from .speed import CONTEXTS, REPEATS, WIDE, baselines, setup, summarize
from .workers import Failed


class Plan:
    """What a speed run measures: model name, threads, methods, contexts, repeats, configurations."""

    def __init__(self, settings: Settings):
        self.settings, self.wide = settings, settings.suite == "wide"
        self.model = WIDE if self.wide else settings.model_name
        self.threads = 1 if not self.wide and settings.small() else cores()
        self.together = self.wide or settings.small()
        self.methods = [*settings.methods, *baselines()]
        self.contexts = CONTEXTS[settings.suite][: 1 if settings.limit else None]

    @property
    def repeats(self) -> int:
        return 1 if self.settings.limit else REPEATS

    def task(self, context: int) -> str:
        return f"{SPEED}{self.settings.suite}:{context}"

    def configuration(self, context: int) -> dict:
        """What must be the same for a stored cell to count as this one."""
        return {
            "model": self.model if self.wide else model_digest(self.settings.model),
            "code": [code_digest(), digest([HERE / "speed.py"])],
            "device": self.settings.device,
            "dtype": self.settings.dtype,
            "threads": self.threads,
            "repeats": self.repeats,
        }

    def missing(self, store: Store) -> list[tuple[int, str]]:
        """(context, method) of the cells that are to be measured."""
        return [
            (context, method)
            for context in self.contexts
            for method in self.methods
            if store.load(self.model, method, self.task(context), self.configuration(context)) is None
        ]

    def worker(self, method: str):
        names = ("suite", "model", "device", "dtype")
        options = {name: getattr(self.settings, name) for name in names} | {"method": method}
        kind = workers.Here if self.settings.jobs == 0 else workers.Worker
        return kind(setup, options, self.threads)


def speed(settings: Settings, store: Store, show) -> int:
    """Make the speed cells that are missing; returns how many methods could not be measured."""
    plan = Plan(settings)
    cells, total = plan.missing(store), len(plan.contexts) * len(plan.methods)
    show.kept(total - len(cells), total, "speed cells")
    needed = [method for method in plan.methods if any(method == m for _, m in cells)]
    failed, bandwidth = 0, [None]
    with show.bar("speed", plan.repeats * len(cells)) as bar:
        for group in [needed] if plan.together else [[method] for method in needed]:
            mine = [cell for cell in cells if cell[1] in group]
            failed += _measure(plan, mine, group, store, show, bar, bandwidth)
    return failed


def _measure(plan: Plan, cells, group, store: Store, show, bar, bandwidth: list) -> int:
    """Measure the cells of a group of methods, each in a process of its own."""
    timed = {method: plan.worker(method) for method in group}
    about: dict[str, dict] = {}
    found: dict[tuple[int, str], list[dict]] = {}

    def ask(method: str, job):
        """A worker's answer, or None after saying what went wrong; it is not asked again."""
        try:
            return timed[method].ask(job)
        except Failed as error:
            show.failed(f"speed of {method}" + (f" at {job}" if isinstance(job, int) else ""), error)
            about.pop(method, None)
            return None

    try:
        failures: dict[str, Failed] = {}
        for method in group:
            try:
                timed[method].finish()
                about[method] = timed[method].ask("about")
            except Failed as error:
                failures[method] = error
        if not about:
            raise next(iter(failures.values()))
        for method, error in failures.items():
            show.failed(f"speed of {method}", error)
        if bandwidth[0] is None:
            bandwidth[0] = ask(next(iter(about)), "bandwidth")
        for context in dict.fromkeys(context for context, _ in cells):
            for _ in range(plan.repeats):
                for method in [m for c, m in cells if c == context]:
                    bar.at((method, f"{context} tokens"), 0, 1)
                    started = time.perf_counter()
                    if method in about and context <= about[method]["longest"]:
                        one = ask(method, context)
                        if one is not None:
                            one["seconds"] = time.perf_counter() - started
                            found.setdefault((context, method), []).append(one)
                    bar.done((method, f"{context} tokens"))
            for method in [m for c, m in cells if c == context and m in about]:
                repeats = found.get((context, method))
                if repeats and len(repeats) == plan.repeats:
                    _save(plan, store, context, method, repeats, about[method], bandwidth[0])
    finally:
        for worker in timed.values():
            worker.stop()
    return len(group) - len(about)


def _save(plan: Plan, store: Store, context: int, method: str, repeats, about: dict, bandwidth) -> None:
    numbers = {
        "rows": [summarize(context, repeats, about, bandwidth)],
        "seconds": sum(one["seconds"] for one in repeats),
        "device": about["device"],
    }
    task, config = plan.task(context), plan.configuration(context)
    store.save(record(plan.settings, plan.model, method, task, config, plan.threads, numbers))
