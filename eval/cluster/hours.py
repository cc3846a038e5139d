"""Hours of a study, from the seconds that stored cells took: `python -m eval.cluster.hours OUT --times 36`.

A job is a task with the methods that were made together: its prefill once, and each method's own seconds.
Jobs go to the next free worker, the longest first, as in a sweep; what a worker needs to start is not in it.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import defaultdict

from ..core.files import address
from ..core.results import Store

WORKERS = (1, 8, 64)


def jobs_of(cells: list[dict]) -> dict[tuple[str, str], float]:
    """{(model, task): seconds of all its methods together, the shared prefill once}."""
    own: dict[tuple[str, str], float] = defaultdict(float)
    shared: dict[tuple[str, str], float] = defaultdict(float)
    for cell in cells:
        if "prefill_seconds" in cell:
            key = cell["model"], cell["task"]
            own[key] += cell["seconds"]
            shared[key] = max(shared[key], cell["prefill_seconds"])
    return {key: own[key] + shared[key] for key in own}


def wall(seconds: list[float], workers: int) -> float:
    """Seconds until the last job is done, on so many workers, the longest jobs first."""
    free = [0.0] * workers
    for job in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + job)
    return max(free)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.cluster.hours", description=__doc__.split("\n")[0])
    parser.add_argument("out", type=address, help="a folder of results, or an address")
    parser.add_argument("--times", type=int, default=1, help="how often its jobs are in the study")
    given = parser.parse_args(words)
    cells = Store(given.out).summaries()
    jobs = jobs_of(cells)
    if not jobs:
        print(f"error: {given.out}: no cell there says its own seconds", file=sys.stderr)
        return 2
    seconds = list(jobs.values()) * given.times
    counted = sum("prefill_seconds" in cell for cell in cells)
    print(f"{counted * given.times} cells in {len(seconds)} jobs, the longest {max(seconds):.0f} s\n")
    print("| workers | hours | of an even share |\n|--:|--:|--:|")
    for workers in WORKERS:
        took = wall(seconds, workers)
        print(f"| {workers} | {took / 3600:.2f} | {sum(seconds) / workers / took:.0%} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
