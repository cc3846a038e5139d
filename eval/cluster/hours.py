"""Hours of a study, from the seconds that stored cells took: `python -m eval.cluster.hours OUT`.

A sweep has a job for each task that OUT holds: its prefill once, and `--methods` methods, each of which takes
what the measured ones take on average. Jobs go to the next free worker, the longest first, whole or cut
(`cut.py`); what a worker needs to start is not in it. OUT is a folder of results, an address, or a file that
--keep wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..core.errors import one_line
from ..core.files import address, write_json
from ..core.machine import machine, versions
from ..core.measurement import count
from ..core.results import Store
from .cut import Seconds, cut, measured, wall

WORKERS = (1, 8, 64)
KEPT = ("model", "task", "method", "seconds", "prefill_seconds")


def table(known: dict[str, Seconds], methods: int, times: int) -> list[str]:
    """Lines: {task: its seconds} for a sweep of so many methods, `times` of them one after the other."""
    names = tuple(map(str, range(methods)))
    whole = [(task, names) for task in known]

    def takes(job) -> float:
        return known[job[0]].of(job[1])

    lines = ["| workers | hours, tasks whole | hours, tasks cut | jobs of a sweep |", "|--:|--:|--:|--:|"]
    for workers in WORKERS:
        jobs = cut(whole, workers, takes)
        hours = [times * wall(map(takes, one), workers) / 3600 for one in (whole, jobs)]
        lines.append(f"| {workers} | {hours[0]:.2f} | {hours[1]:.2f} | {len(jobs)} |")
    return lines


def read(where) -> list[dict]:
    """Cells that say their own seconds."""
    if str(where).endswith(".json"):
        cells = json.loads(Path(where).read_text(encoding="utf-8"))["cells"]
    else:
        cells = Store(where).summaries()
    return [{key: cell[key] for key in KEPT} for cell in cells if "prefill_seconds" in cell]


def said(cells: list[dict], methods: int | None, times: int) -> list[str]:
    """What the command prints of these cells of one model."""
    known = {task: seconds for (_, task), seconds in measured(cells).items()}
    methods = methods or max(len(seconds.own) for seconds in known.values())
    own = [seconds.usual for seconds in known.values()]
    shared = [seconds.shared for seconds in known.values()]
    return [
        f"{times * methods * len(known)} cells: {times} sweeps of {len(known)} tasks with {methods} methods",
        f"a task's prefill: {min(shared):.1f} to {max(shared):.1f} s; a method on it: {min(own):.2f} to "
        f"{max(own):.2f} s",
        "",
        *table(known, methods, times),
    ]


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.cluster.hours", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=address, help="a folder of results, an address, or a file of --keep's")
    parser.add_argument("--methods", type=count, help="of a sweep (default: as many as were measured)")
    parser.add_argument("--times", type=count, default=1, help="sweeps, one after the other (default: 1)")
    parser.add_argument("--keep", type=Path, help="a JSON file for the seconds")
    given = parser.parse_args(words)
    try:
        cells = read(given.out)
        if len({cell["model"] for cell in cells}) != 1:
            raise ValueError(f"{given.out}: expected cells of one model that say their own seconds")
        if given.keep:
            write_json(given.keep, {"machine": machine(), "versions": versions(), "cells": cells})
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    print("\n".join(said(cells, given.methods, given.times)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
