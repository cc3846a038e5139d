"""The output of a run while it works: a bar, or lines without a terminal, and errors.

Everything goes to stderr, so that stdout holds the result alone. Nobody has to listen: a run goes on when the
reader of its stderr has left.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LOG = "errors.log"  # full tracebacks, in the output folder
PATIENT = 60.0  # seconds before a run is at work, after which it says what it does
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
        except OSError:  # and other lines must not end the run
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
    def waiting(self, text: str) -> Iterator[None]:
        """Meanwhile something moves: on a terminal at once, elsewhere a line every `PATIENT` seconds."""
        if self.console.is_terminal and not self.console.quiet:
            with self.console.status(text):
                yield
            return
        over, started = threading.Event(), time.monotonic()

        def remind() -> None:
            while not over.wait(PATIENT):
                self.line(f"{text}, {time.monotonic() - started:.0f} s")

        threading.Thread(target=remind, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    @contextlib.contextmanager
    def bar(self, name: str, total: int, work: float) -> Iterator[Bar]:
        """Progress over `total` cells, also within a cell; work: how long all of them take, in the unit of
        `at`."""
        if not total or self.console.quiet:
            yield Bar(name, total, work)
        elif self.console.is_terminal:
            with Progress(*COLUMNS, console=self.console, transient=True) as progress:
                yield Drawn(name, total, work, progress)
        else:
            bar = Told(name, total, work, self.line)
            try:
                yield bar
            finally:
                bar.over.set()


class Bar:
    """Adds up the work of all that is under way, and says how long the rest will take."""

    def __init__(self, name: str, total: int, work: float):
        self.name, self.total, self.work, self.finished, self.ended = name, total, work, 0, 0.0
        self.parts: dict[str, float] = {}
        self.started = time.monotonic()

    def at(self, what: str, work: float) -> None:
        """So much of `what` is done."""
        self.parts[what] = work

    def doing(self, text: str) -> None:
        """What is being done now, where nothing grows by it, or what of a cell is done."""

    def done(self, what: str, result: str | None, work: float = 1.0) -> None:
        """A cell of so much work is finished, with this result (None: it failed, which was said already)."""
        self.finished, self.ended = self.finished + 1, self.ended + work

    def amount(self) -> float:
        """Work that is done, that of unfinished cells among it."""
        return max(sum(self.parts.values()), self.ended)

    def left(self) -> str:
        """ ", about 2 min left", as far as that can be known: at the speed so far."""
        done = self.amount()
        if not 0 < done < self.work:
            return ""
        seconds = (self.work - done) * (time.monotonic() - self.started) / done
        return f", about {seconds / 60:.0f} min left" if seconds > 90 else f", about {seconds:.0f} s left"


COLUMNS = (
    TextColumn("{task.fields[name]:<8}", markup=False),
    BarColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.description}", markup=False),
)


class Drawn(Bar):
    """A bar on a terminal."""

    def __init__(self, name: str, total: int, work: float, progress: Progress):
        super().__init__(name, total, work)
        self.progress, self.task = progress, progress.add_task("", total=work, name=name)

    def at(self, what: str, work: float) -> None:
        super().at(what, work)
        self.doing(what)

    def doing(self, text: str) -> None:
        told = f"{self.finished}/{self.total} {text}{self.left()}"
        self.progress.update(self.task, completed=self.amount(), description=told)


class Told(Bar):
    """Lines: one for every finished cell, and one whenever there was none for `SILENT` seconds."""

    def __init__(self, name: str, total: int, work: float, line):
        super().__init__(name, total, work)
        self.line, self.over, self.lock = line, threading.Event(), threading.Lock()
        self.said = self.since = self.started  # since when it is at something new; 0.0: there are numbers
        self.place = "getting ready"
        threading.Thread(target=self._remind, daemon=True).start()

    def at(self, what: str, work: float) -> None:
        with self.lock:
            super().at(what, work)
            self.place, self.since = f"at {what}", 0.0

    def doing(self, text: str) -> None:
        with self.lock:
            self.place, self.since = text, time.monotonic()

    def done(self, what: str, result: str | None, work: float = 1.0) -> None:
        super().done(what, result, work)
        if result is not None:
            self._say(f"{what}: {result}" if result else what)

    def _say(self, text: str) -> None:
        with self.lock:
            self.said = time.monotonic()
            self.line(f"{self.finished}/{self.total} {text}{self.left()}")

    def _remind(self) -> None:
        while not self.over.wait(max(0.01, self.said + SILENT - time.monotonic())):
            if time.monotonic() - self.said >= SILENT:
                since = f", since {time.monotonic() - self.since:.0f} s" if self.since else ""
                self._say(f"{self.name}, {self.place}{since}")
