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
    """Lines and bars of one run."""

    def __init__(self, out: Path):
        self.out = out
        self.console = Console(stderr=True, highlight=False)

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
        """A bar over `total` cells that also moves within a cell."""
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
    """Adds up the finished parts of all that is under way, in cells."""

    def __init__(self, progress: Progress | None, task):
        self.progress, self.task, self.parts = progress, task, {}

    def at(self, what: str, part: float) -> None:
        """`part` cells of `what` are done."""
        self.parts[what] = part
        if self.progress is not None:
            completed = sum(self.parts.values())
            self.progress.update(self.task, completed=completed, description=what)
