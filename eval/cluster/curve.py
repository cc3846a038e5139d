"""Curve: what part of an even share jobs on Ray reach, by their length: `python -m eval.cluster.curve`.

Jobs that only sleep go through the loop, the pool, the driver and the store of a sweep, a cell each. Before
those of a length every actor gets one that waits until all actors have theirs, so that no start counts. From
then on until the last cell is stored, efficiency is the seconds slept, as each job measured them, over actors
times seconds. All on this machine, in a cluster of the command's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from ..core.errors import Failed, Problem
from ..core.files import write_json
from ..core.machine import commit, cores, machine, versions
from ..core.measurement import Cell, Measurement, count, run
from ..core.results import Store
from ..core.show import Show
from .options import amount
from .pool import OnRay, place

LEAST = 50  # jobs of each length
POLL = 0.02  # seconds between looks whether all actors are there


@dataclass(kw_only=True)
class Sleeping(Measurement):
    """count: jobs of each length; gate: a folder in which actors meet."""

    name = "sleep"
    device = "cpu"

    actors: int
    lengths: tuple[float, ...]
    count: int
    gate: str
    stored: dict[float, float] = field(default_factory=dict)  # length -> when its last cell was stored
    jobs: list[dict] = field(default_factory=list)  # what jobs told, those that wait among them
    about: dict = field(default_factory=dict)  # kind -> its processes
    cpu: dict[str, float] = field(default_factory=dict)  # kind -> seconds of a core

    def cells(self) -> list[Cell]:
        numbers = range(self.count)
        return [
            Cell("", "", f"sleep:{s}:{n}", {"actors": self.actors}) for s in self.lengths for n in numbers
        ]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict]]:
        jobs: list = []
        for length in self.lengths:
            jobs += [(length, None)] * self.actors
            jobs += [(length, cell) for cell in cells if cell.task.split(":")[1] == str(length)]
        share = int(1e4 * cores() / self.actors) / 1e4
        pool = OnRay(None, self.actors, share, threads=0, named=lambda job: f"{job[0]:g} s")
        for done in pool.run(__name__, self, lambda workers: jobs, lambda *_: None):
            length, cell = done.job
            if isinstance(done.found, Failed):
                raise done.found
            self.jobs.append(done.found | {"length": length, "waits": cell is None})
            if cell is not None:
                yield cell, {"seconds": done.found["seconds"], "device": "cpu"} | done.about
                self.stored[length] = time.time()
            if not self.about:
                self.about = processes()
            if len(self.jobs) % self.actors == 0:  # not at each: a look at all processes takes milliseconds
                self.cpu = busy(self.about)

    def efficiencies(self) -> list[dict]:
        """A row for each length."""
        rows = []
        for length in self.lengths:
            jobs = [job for job in self.jobs if job["length"] == length]
            opened = max(job["ended"] for job in jobs if job["waits"])
            slept = [job for job in jobs if not job["waits"]]
            seconds = self.stored[length] - opened
            rows.append(
                {
                    "actors": self.actors,
                    "length": length,
                    "jobs": len(slept),
                    "seconds": seconds,
                    "efficiency": sum(job["seconds"] for job in slept) / (self.actors * seconds),
                    "between": median(gaps(jobs)),
                }
            )
        return rows


def gaps(jobs: list[dict]) -> list[float]:
    """Seconds between two jobs of one actor."""
    found = []
    for process in {job["process"] for job in jobs}:
        mine = sorted((j for j in jobs if j["process"] == process), key=lambda j: j["ended"])
        found += [after["ended"] - after["seconds"] - before["ended"] for before, after in pairwise(mine)]
    return found


def processes() -> dict[str, list[psutil.Process]]:
    """This process, Ray's driver, Ray's own, and the actors."""
    found: dict[str, list[psutil.Process]] = {"command": [psutil.Process()]}
    for child in psutil.Process().children(recursive=True):
        line = " ".join(child.cmdline())
        kind = "driver" if "spawn_main" in line else "actors" if "ray::" in line else "Ray"
        found.setdefault(kind, []).append(child)
    return found


def busy(about: dict[str, list[psutil.Process]]) -> dict[str, float]:
    """Seconds of a core that each kind has taken so far."""
    times: dict[str, float] = dict.fromkeys(about, 0.0)
    for kind, ones in about.items():
        for one in ones:
            with contextlib.suppress(psutil.NoSuchProcess):
                times[kind] += sum(one.cpu_times()[:2])
    return times


def setup(options: Sleeping, report):
    """An actor's handler."""
    gate = Path(options.gate)

    def handle(job: tuple) -> dict:
        length, cell = job
        begun = time.perf_counter()
        if cell is None:
            (gate / f"{length}-{os.getpid()}").touch()
            while len(list(gate.glob(f"{length}-*"))) < options.actors:
                time.sleep(POLL)
        else:
            time.sleep(length)
        return {"seconds": time.perf_counter() - begun, "ended": time.time(), "process": os.getpid()}

    return handle


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.cluster.curve", description=__doc__.split("\n")[0])
    parser.add_argument("--actors", type=count, nargs="+", default=[1, 8, 64])
    parser.add_argument("--lengths", type=amount, nargs="+", default=[0.1, 0.5, 1.0, 2.0], help="seconds")
    parser.add_argument(
        "--jobs", type=count, default=20, help=f"of each length an actor (default: 20), {LEAST} at least"
    )
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    given = parser.parse_args(words)
    rows = []
    try:
        place("ray")
        for actors in given.actors:
            with tempfile.TemporaryDirectory(prefix="kc") as folder:
                store = Store(Path(folder) / "out")
                store.prepare()
                sleeping = Sleeping(
                    actors=actors,
                    lengths=tuple(given.lengths),
                    count=max(LEAST, given.jobs * actors),
                    gate=folder,
                )
                show = Show(store.out)
                show.console.quiet = True
                run(sleeping, store, show)
            for row in sleeping.efficiencies():
                rows.append(row)
                print(
                    f"{actors} actors, {row['length']:g} s: {row['efficiency']:.3f}, "
                    f"{1000 * row['between']:.0f} ms between two jobs of an actor",
                    flush=True,
                )
            took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sleeping.cpu.items())
            print(f"{actors} actors, time of a core: {took}", flush=True)
            write_json(given.out, about() | {"rows": rows})
        print("\n".join(table(rows)))
    except (Problem, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def table(rows: list[dict]) -> list[str]:
    """Lines: efficiencies by actors and length."""
    lengths = sorted({row["length"] for row in rows})
    found = {(row["actors"], row["length"]): row["efficiency"] for row in rows}
    lines = [
        f"| actors |{''.join(f' {length:g} s |' for length in lengths)}",
        "|--:|" + "--:|" * len(lengths),
    ]
    for actors in sorted({row["actors"] for row in rows}):
        values = "".join(f" {found[actors, length]:.2f} |" for length in lengths)
        lines.append(f"| {actors} |{values}")
    return lines


def about() -> dict:
    return {"machine": machine(), "versions": versions(), "commit": commit()}


if __name__ == "__main__":
    from .curve import main as named  # as the actors know it, where __main__ is another module

    sys.exit(named())
