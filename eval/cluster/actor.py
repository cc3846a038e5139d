"""Actor: a process of Ray's that holds a loaded model and does one job after another.

Nothing is raised through Ray: what a job or the set-up found, or how it failed, is returned.
"""

from __future__ import annotations

import contextlib
import platform
import sys
from contextlib import redirect_stdout
from importlib import import_module

from ..core.digests import code_digest
from ..core.errors import describe, no_room
from ..core.machine import commit, machine, versions
from ..core.workers import quiet


class Actor:
    """threads: torch's (0: jobs that do not need it, None: its default). expected: what the command says of
    its own kvlab, {"version": ..., "code": digest}."""

    def __init__(self, maker: str, options, threads: int | None, expected: dict[str, str]):
        self.maker, self.options, self.threads, self.expected = maker, options, threads, expected

    def set_up(self) -> tuple:
        """("ready", None), or ("failed" or "full", (line, traceback)); the line names the node."""
        try:
            found = {"version": versions()["kvlab"], "code": code_digest()}
            if found != self.expected:
                raise ValueError(
                    f"it runs another kvlab ({found}) than this command ({self.expected}): install the same "
                    "one on every node"
                )
            if self.threads != 0:
                quiet(self.threads)
            with redirect_stdout(sys.stderr):
                self.handler = import_module(self.maker).setup(self.options, lambda *how: None)
            device = self.options.device or _usual_device()
            self.about = {"machine": machine(device, self.threads), "node": platform.node()}
            self.about |= {"versions": versions(), "commit": commit()}
        except Exception as error:
            line, traceback = describe(error)
            return _how(error), (f"on node {platform.node()}: {line}", traceback)
        return "ready", None

    def do(self, job, name: str) -> tuple:
        """("done", (what the job found, where)), ("failed", (line, traceback)), or "full" in the place of
        "failed", where this node has no room on its disk. The log of this process says which job it is at."""
        _log(f"begins: {name}")
        try:
            with redirect_stdout(sys.stderr):
                return "done", (self.handler(job), self.about)
        except Exception as error:
            return _how(error), describe(error)
        finally:
            _log(f"ends: {name}")


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # if the disk is full, the job reports it
        print(line, file=sys.stderr, flush=True)


def _how(error: Exception) -> str:
    return "full" if no_room(error) else "failed"


def _usual_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
