"""The measurement `speed`: a cell is one method at one context."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from kvlab.measure.host import cores, cpu_model

from .. import PACKAGE
from ..cluster.options import Pooled
from ..core import workers
from ..core.comparable import MACHINE, SPEED
from ..core.errors import Failed, Problem
from ..core.measurement import Cell, flag, natural, option
from ..core.progress import Bar
from .baselines import baselines

REPEATS = 2
CONTEXTS = {"model": (256, 512, 1024, 2048), "wide": (1024, 2048, 4096, 8192, 16384)}
BUSY = 0.3  # part of the time without a core from which on a timing is one of the machine's other work
WIDE = "wide-random"  # name of the wide suite's model in results


@dataclass(kw_only=True)
class Speed(Pooled):
    """Nothing else runs meanwhile. The processes of all methods live together and at each context every one
    is timed once, then all again, so that a busy minute of the machine hits all of them; only a model too
    large to be loaded that often (see `small`) is timed method by method. Threads are fixed. A cell is stored
    when its last repeat is in."""

    name = "speed"
    about = "time prefill and decode beside transformers' caches and llama.cpp's, then write the report"
    maker = f"{PACKAGE}.speed.timing"

    suite: str = option(
        "model: the model itself; wide: 1k to 16k tokens on a wider Llama with random weights",
        "model",
        choices=["model", "wide"],
    )
    jobs: int | None = option("worker processes; 0 times in this one", type=natural)
    allow_noisy: bool = flag("under Ray, let others use the node meanwhile; the cells record it")
    engine: str | None = option(
        "engine of kvlab's decode steps (default: graph on a GPU, else eager)",
        choices=["eager", "compiled", "graph"],
    )
    weights: str = option(
        "type of the weights in the compiled engine (default: fp32)",
        "fp32",
        choices=["fp32", "bf16", "int8"],
    )

    @property
    def wide(self) -> bool:
        return self.suite == "wide"

    @property
    def home(self) -> str:
        return "bench" if self.wide else "demo"

    @property
    def model_name(self) -> str:
        return WIDE if self.wide else super().model_name

    @property
    def threads(self) -> int:
        return 1 if not self.wide and self.small() else cores()

    @property
    def repeats(self) -> int:
        return 1 if self.limit else REPEATS

    @property
    def contexts(self) -> tuple[int, ...]:
        return tuple(context for context in self.asked if context <= (self.longest or context))

    @property
    def asked(self) -> tuple[int, ...]:
        """The suite's contexts, whatever the model takes."""
        return CONTEXTS[self.suite][: 1 if self.limit else None]

    @property
    def longest(self) -> int | None:
        """The model's most tokens, if its configuration states them."""
        return None if self.wide else context_limit(self.model)

    def run(self, store, show) -> int:
        if over := ", ".join(str(context) for context in self.asked if context not in self.contexts):
            show.line(f"speed at {over} tokens is left out: {self.model_name} takes {self.longest}")
        return super().run(store, show)

    def check(self) -> None:
        self.engine = self.engine or self.engine_here()
        if self.weights != "fp32" and self.engine != "compiled":
            raise Problem(
                f"--weights {self.weights}: the eager engine reads fp32 alone; add --engine compiled"
            )
        super().check()

    def cells(self) -> list[Cell]:
        shared = {"threads": self.threads, "repeats": self.repeats}
        if self.engine != "eager":  # of a run: the rows of a table come from one
            shared["engine"] = self.engine
        if self.weights != "fp32":
            shared["weights"] = self.weights
        methods = {name: self.configuration(method=code, **shared) for name, code in self.codes.items()}
        methods |= {name: self.configuration(**shared) for name in baselines(self.beside_llama())}
        return [
            Cell(self.model_name, method, f"{SPEED}{self.suite}:{context}", config)
            for context in self.contexts
            for method, config in methods.items()
        ]

    def beside_llama(self) -> bool:
        """Whether llama.cpp is timed, too: on this machine's CPU, a model that it reads in fp32 or as narrow
        as ours."""
        from kvlab.models import configuration

        from . import llama

        on_cpu = self.on is None and self.device in (None, "cpu") and not self.on_gpu()
        if not (llama.there() and on_cpu and self.dtype in (None, "float32")):
            return False
        return self.wide or llama.takes(configuration(self.model), self.weights)

    def configuration(self, **more) -> dict:
        import torch

        found = super().configuration(**more)
        if self.on is None:
            found[MACHINE] = f"{cpu_model()}, {cores()} cores"
            if self.on_gpu():
                found[MACHINE] += f", {torch.cuda.get_device_name(self.device or 'cuda')}"
        return found | ({"model": WIDE} if self.wide else {})

    def work(self, cell: Cell) -> float:
        return 1.0 + context_of(cell) / 256

    def label(self, cell: Cell) -> str:
        return f"speed of {cell.method} at {context_of(cell)} tokens"

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        if self.on is not None:
            yield from self._on_ray(cells, bar)
            return
        methods = list(dict.fromkeys(cell.method for cell in cells))
        bandwidth: list = []
        for group in [methods] if self.wide or self.small() else [[method] for method in methods]:
            yield from self._together([cell for cell in cells if cell.method in group], bar, bandwidth)

    def _on_ray(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        """The cells of one context after the other, on a node reserved for them."""
        jobs = [
            tuple(c for c in cells if context_of(c) == at) for at in dict.fromkeys(map(context_of, cells))
        ]
        pool = self.pool(lambda job: f"{len(job)} methods · {job[0].task}", alone=not self.allow_noisy)

        def report(job, done: float, total: float) -> None:
            bar.at(f"{context_of(job[0])} tokens", done * self.work(job[0]))

        for done in pool.run(f"{PACKAGE}.speed.speed", self, lambda workers: jobs, report):
            if isinstance(done.found, Failed):
                yield done.job[0], done.found
                continue
            for cell, found in done.found:
                more = done.about | {"alone": not self.allow_noisy}
                yield cell, found if isinstance(found, Failed) else found | more
            bar.at(f"{context_of(done.job[0])} tokens", sum(map(self.work, done.job)))

    def worker(self, method: str):
        """A process, or a substitute, that times a method."""
        names = ("suite", "model", "device", "dtype", "engine", "weights")
        options = {name: getattr(self, name) for name in names} | {"method": method}
        kind = workers.Here if self.jobs == 0 else workers.Worker
        return kind(self.maker, options, self.threads)

    def _together(self, cells: list[Cell], bar, bandwidth: list) -> Iterator[tuple[Cell, dict | Failed]]:
        """Time the methods of these cells, each in a process of its own; a method that fails once is not
        asked again, and one of its cells says why. Raises Failed where not one can be set up."""
        from .timing import summarize

        first = {cell.method: cell for cell in reversed(cells)}
        timed = {method: self.worker(method) for method in dict.fromkeys(cell.method for cell in cells)}
        about: dict[str, dict] = {}
        failures: dict[str, Failed] = {}
        try:
            for method, worker in timed.items():
                try:
                    worker.finish()
                    about[method] = worker.ask("about")
                except Failed as error:
                    failures[method] = error
            if not about:
                raise next(iter(failures.values()))
            yield from ((first[method], error) for method, error in failures.items())
            if not bandwidth:
                bandwidth.append(timed[next(iter(about))].ask("bandwidth"))
            for context in dict.fromkeys(map(context_of, cells)):
                mine = [cell for cell in cells if context_of(cell) == context and cell.method in about]
                found: dict[Cell, list[dict]] = {cell: [] for cell in mine}
                for repeat in range(self.repeats):
                    for cell in mine:
                        bar.at(self.label(cell), self.work(cell) * repeat / self.repeats)
                        if cell.method not in about or context > about[cell.method]["longest"]:
                            continue
                        try:
                            found[cell].append(timed[cell.method].ask(context))
                        except Failed as error:
                            del about[cell.method]
                            yield cell, error
                            continue
                        bar.at(self.label(cell), self.work(cell) * (repeat + 1) / self.repeats)
                for cell, repeats in found.items():
                    bar.at(self.label(cell), self.work(cell))
                    if cell.method in about and repeats:
                        row = summarize(context, repeats, about[cell.method], bandwidth[0])
                        seconds, device = sum(one["seconds"] for one in repeats), about[cell.method]["device"]
                        yield cell, {"rows": [row], "seconds": seconds, "device": device}
        finally:
            for worker in timed.values():
                worker.stop()

    def result(self, found: dict) -> str:
        row, said = found["rows"][0], ""
        if (waited := row.get("waited", 0)) > BUSY:
            said = f", too slow: it waited {100 * waited:.0f} % of the time for a core"
        return f"{row['decode_ms']:.2f} ms per token{said}"


def setup(settings: Speed, report: Callable) -> Callable:
    """The handler of an actor of Ray, which has its node for itself: cells of one context -> [(cell, its
    numbers, or why there are none)]. Methods get processes of their own there, as on one machine."""
    here = replace(settings, on=None, actors=None, cpus_per_actor=None, gpus_per_actor=None)
    return lambda cells: list(here.made(list(cells), Bar(here.name, len(cells), len(cells))))


@cache
def context_limit(name: str | None) -> int | None:
    """Tokens that a model takes, from its configuration; None where that does not say."""
    from kvlab.models import configuration, source_of

    if name is None:  # transformers takes a second to find the configuration's class
        said = json.loads((source_of() / "config.json").read_text(encoding="utf-8"))
        return said["max_position_embeddings"]
    try:
        config = configuration(name)
    except ValueError:  # whoever loads the model says what is wrong
        return None
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def context_of(cell: Cell) -> int:
    """Tokens, the last part of a speed cell's task."""
    return int(cell.task.rpartition(":")[2])
