"""Options of a measurement whose jobs may go to Ray."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import Problem
from ..core.measurement import OfMethods, count, option
from .pool import OnRay, place

Job = tuple[str, tuple[str, ...]]  # a task, and methods


def pieces(jobs: list[Job], workers: int) -> list[Job]:
    """The jobs, of which each is cut by method into as many as leave no worker idle: a piece computes the
    task's prefill again, but all pieces run at once, so none ends later than the whole would."""
    parts = max(1, workers // len(jobs)) if jobs else 1
    cut = [(task, methods[part::parts]) for task, methods in jobs for part in range(parts)]
    return [(task, methods) for task, methods in cut if methods]


def amount(text: str) -> float:
    """A number of at least 0, parts of one too."""
    if not 0 <= (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


@dataclass(kw_only=True)
class Pooled(OfMethods):
    """A measurement whose jobs go to worker processes of this machine, or, with --on, to Ray's actors."""

    on: str | None = option(
        "ray: processes on this machine; ray:HOST:PORT: a running cluster", metavar="WHERE"
    )
    actors: int | None = option("models to load at a time under Ray (default: as many as fit)", type=count)
    cpus_per_actor: float | None = option(
        "cores (default: 1 for a small model, else all of a node)", type=amount
    )
    gpus_per_actor: float | None = option("GPUs; 0.5 puts two actors on one GPU (default: 0)", type=amount)

    def check(self) -> None:
        super().check()
        if self.on is not None:
            if len(self.devices) > 1:
                raise Problem(f"--device {self.device!r}: under Ray an actor has one; see --gpus-per-actor")
            place(self.on)
            return
        for name in ("actors", "cpus_per_actor", "gpus_per_actor"):
            if getattr(self, name) is not None:
                raise Problem(f"--{name.replace('_', '-')}: needs --on ray")

    def pool(self, named: Callable[[object], str], alone: bool = False) -> OnRay | None:
        """Ray's, or None where jobs stay on this machine; named: what a job is called in Ray's dashboard."""
        if self.on is None:
            return None
        cpus = self.cpus_per_actor
        if cpus is None and (self.threads == 1 or self.gpus_per_actor):
            cpus = 1
        return OnRay(place(self.on), self.actors, cpus, self.gpus_per_actor or 0, alone, self.threads, named)
