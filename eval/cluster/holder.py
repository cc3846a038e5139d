"""Holder: what an actor of Ray is: a process that holds a loaded model and does one job after another.

Nothing is raised through Ray: what a job or the set-up found, or how it failed, is returned. A holder whose
driver has neither given it a job nor asked where it is for `ORPHANED` seconds ends itself, for then nobody
waits for its answer.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from contextlib import redirect_stdout
from importlib import import_module

from ..core.digests import code_digest
from ..core.errors import describe, no_room
from ..core.machine import commit, machine, versions
from ..core.workers import quiet

ORPHANED = 120.0  # seconds
CONCURRENT = 2  # a job, and the question where it is


def unlike(maker: str, options, expected: dict[str, str]) -> str | None:
    """How kvlab on this node differs from the driver's, in one line; None where it does not. expected:
    {"kvlab": version, "code": digest} of the driver."""
    found = {"kvlab": versions()["kvlab"], "code": code_digest()}
    if found == expected:
        return None
    return (
        f"node {platform.node()} runs another kvlab ({_said(found)}) than this command "
        f"({_said(expected)}): install the same one on every node"
    )


class Holder:
    """See the module's text. threads: torch's (0: jobs that do not need it, None: its default). expected:
    as in `unlike`."""

    def __init__(self, maker: str, options, threads: int | None, expected: dict[str, str]):
        self.maker, self.options, self.threads, self.expected = maker, options, threads, expected
        self.place = (None, 0, 1)  # job's number, done, total
        self.asked = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while time.monotonic() - self.asked < ORPHANED:
            time.sleep(1.0)
        os._exit(1)

    def at(self) -> tuple:
        """(number of the job, how much of it is done, how much there is)."""
        self.asked = time.monotonic()
        return self.place

    def set_up(self) -> tuple:
        """("ready", process id), or ("failed" or "full", (line, traceback, node))."""
        try:
            if line := unlike(self.maker, self.options, self.expected):
                raise ValueError(line)
            if self.threads != 0:
                quiet(self.threads)
            with redirect_stdout(sys.stderr):
                self.handler = import_module(self.maker).setup(self.options, self._report)
            device = self.options.device or _usual_device()
            self.about = {"machine": machine(device, self.threads), "node": platform.node()}
            self.about |= {"versions": versions(), "commit": commit()}
        except Exception as error:
            return _how(error), (*describe(error), platform.node())
        return "ready", os.getpid()

    def _report(self, done: int, total: int) -> None:
        self.place = (self.place[0], done, total)

    def do(self, number: int, job, name: str) -> tuple:
        """("done", (what the job found, where)), ("failed", (line, traceback)), or "full" in the place of
        "failed", where this node has no room on its disk. The log of this process says which job it is at."""
        self.place, self.asked = (number, 0, 1), time.monotonic()
        _log(f"begins: {name}")
        try:
            with redirect_stdout(sys.stderr):
                found = self.handler(job)
        except Exception as error:
            return _how(error), describe(error)
        finally:
            _log(f"ends: {name}")
        return "done", (found, self.about)


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # where the disk is full, the job shall say so
        print(line, file=sys.stderr, flush=True)


def _how(error: Exception) -> str:
    return "full" if no_room(error) else "failed"


def _usual_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _said(found: dict[str, str]) -> str:
    return f"version {found['kvlab']}, code {found['code']}"
