"""Speed cells made by an actor of Ray, which has its node for itself: those of one context at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..core.progress import Bar


def setup(settings, report: Callable) -> Callable:
    """A worker's handler: cells of one context -> [(cell, its numbers, or why there are none)].

    settings: a `Speed`, whose methods get processes of their own here as they would on one machine.
    """
    here = replace(settings, on=None, actors=None, cpus_per_actor=None, gpus_per_actor=None)
    return lambda cells: list(here.made(list(cells), Bar(here.name, len(cells), len(cells))))
