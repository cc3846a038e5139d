"""What a run prints while it works: one progress bar, and lines for what was kept or went wrong.

Everything goes to stderr, so that stdout holds the result alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG = "errors.log"  # full tracebacks, in the output folder


class Show:
    """Lines and bars of one run. `finished` counts the cells stored, `made` those of this run."""

    def __init__(self, out: Path):
        self.out = out
        self.console = Console(stderr=True, highlight=False)
        self.stored = 0

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def kept(self, kept: int, total: int, what: str) -> None:
        """Say how much of a run is there already."""
        if kept:
            self.line(f"{kept} of {total} {what} are kept from an earlier run with the same settings")

    def failed(self, what: str, error) -> None:
        """One line; the traceback goes to OUT/errors.log."""
        self.line(f"failed: {what}: {error} (details in {self.out / LOG})")
        with contextlib.suppress(OSError), open(self.out / LOG, "a", encoding="utf-8") as log:
            log.write(f"{what}: {error}\n{getattr(error, 'details', '')}\n")

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Bar]:
        """A bar over `total` jobs that also moves within a job."""
        if not total:
            yield Bar(None, None)
            return
        columns = (
            TextColumn("{task.fields[name]:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield Bar(progress, progress.add_task("", total=total, name=name))


class Bar:
    """Counts finished jobs and the finished parts of those under way."""

    def __init__(self, progress: Progress | None, task):
        self.progress, self.task = progress, task
        self.finished, self.parts = 0, {}

    def at(self, job, done: int, total: int) -> None:
        """`job`, a pair whose first part is its name, has done a part of its work."""
        self.parts[job] = min(1.0, done / max(total, 1))
        self._draw(job)

    def done(self, job) -> None:
        self.parts.pop(job, None)
        self.finished += 1
        self._draw(job)

    def _draw(self, job) -> None:
        if self.progress is not None:
            completed = self.finished + sum(self.parts.values())
            self.progress.update(self.task, completed=completed, description=str(job[0]))
