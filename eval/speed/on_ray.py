"""Speed cells made by an actor of Ray, which has its node for itself: those of one context at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.progress import Bar


class Reported(Bar):
    """Tells how far the cells of a job are."""

    def __init__(self, name: str, total: int, report: Callable):
        super().__init__(name, total)
        self.report = report

    def at(self, what: str, part: float) -> None:
        super().at(what, part)
        self.report(sum(self.parts.values()), self.total)


def setup(settings, report: Callable) -> Callable:
    """A worker's handler: cells of one context -> [(cell, its numbers, or why there are none)].

    settings: a `Speed`, whose methods get processes of their own here as they would on one machine.
    """
    here = replace(settings, on=None, actors=None, cpus_per_actor=None, gpus_per_actor=None)
    return lambda cells: list(here.made(list(cells), Reported(here.name, len(cells), report)))
