"""What a run prints while it works: a bar, or lines where there is no terminal, and what went wrong.

Everything goes to stderr, so that stdout holds the result alone. Nobody has to listen: a run goes on when
whoever reads its stderr has left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LOG = "errors.log"  # full tracebacks, in the output folder
SILENT = 20.0  # seconds without a line after which a run without a terminal says where it is


class Verbatim(Console):
    """A console on which names and paths appear as they are: no markup, no emoji codes, no highlights."""

    def __init__(self, **how):
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def on_broken_pipe(self) -> None:
        """Who reads has left: the caller decides what that means (rich would end the process)."""
        raise


class Show:
    """Lines and bars of one run. out: the folder of the log, which a line calls `log` where it goes on to
    another place from there."""

    def __init__(self, out: Path, log: str | None = None):
        self.out, self.log = out, log or str(out / LOG)
        self.console = Verbatim(stderr=True)

    def line(self, text: str) -> None:
        try:
            self.console.print(text, soft_wrap=True)
        except OSError:  # and nobody else's lines shall end the run
            self.console.quiet = True
            with contextlib.suppress(OSError, ValueError, AttributeError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())

    def kept(self, kept: int, total: int, what: str) -> None:
        """Say how much of a run is there already."""
        if kept:
            all_of_it = ": everything is there" if kept == total else ""
            self.line(
                f"{kept} of {total} {what} are kept from an earlier run with the same settings{all_of_it}"
            )

    def failed(self, what: str, error) -> None:
        """One line; the traceback goes to OUT/errors.log."""
        self.line(f"failed: {what}: {error} (details in {self.log})")
        with contextlib.suppress(OSError), open(self.out / LOG, "a", encoding="utf-8") as log:
            log.write(f"{what}: {error}\n{getattr(error, 'details', '')}\n")

    @contextlib.contextmanager
    def bar(self, name: str, total: int) -> Iterator[Bar]:
        """Progress over `total` cells, also within a cell."""
        if not total or self.console.quiet:
            yield Bar(name, total)
        elif self.console.is_terminal:
            with Progress(*COLUMNS, console=self.console, transient=True) as progress:
                yield Drawn(name, total, progress)
        else:
            yield Told(name, total, self.line)


class Bar:
    """Adds up the finished parts of all that is under way, in cells."""

    def __init__(self, name: str, total: int):
        self.name, self.total, self.finished = name, total, 0
        self.parts: dict[str, float] = {}

    def at(self, what: str, part: float) -> None:
        """`part` cells of `what` are done."""
        self.parts[what] = part

    def done(self, what: str, result: str | None) -> None:
        """A cell is finished, with this result (None: it failed, which was said already)."""
        self.finished += 1


COLUMNS = (
    TextColumn("{task.fields[name]:<8}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
    TextColumn("{task.description}", markup=False),
)


class Drawn(Bar):
    """A bar on a terminal."""

    def __init__(self, name: str, total: int, progress: Progress):
        super().__init__(name, total)
        self.progress, self.task = progress, progress.add_task("", total=total, name=name)

    def at(self, what: str, part: float) -> None:
        super().at(what, part)
        self.progress.update(self.task, completed=sum(self.parts.values()), description=what)


class Told(Bar):
    """Lines: one for every finished cell, and one where there was none for `SILENT` seconds."""

    def __init__(self, name: str, total: int, line):
        super().__init__(name, total)
        self.line, self.started, self.said = line, time.monotonic(), time.monotonic()

    def at(self, what: str, part: float) -> None:
        super().at(what, part)
        if time.monotonic() - self.said >= SILENT:
            self.say(f"{self.name}, at {what}")

    def done(self, what: str, result: str | None) -> None:
        super().done(what, result)
        if result is not None:
            self.say(f"{what}: {result}" if result else what)

    def say(self, text: str) -> None:
        """A line, and how long the rest takes if it is as quick as what is done."""
        self.said, done = time.monotonic(), max(sum(self.parts.values()), self.finished)
        seconds = (self.said - self.started) * (self.total - done) / done if done else 0.0
        left = f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"
        self.line(f"{self.finished}/{self.total} {text}{left * (0 < done < self.total)}")
