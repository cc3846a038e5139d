"""Worker: the process that measures units, one after another; it is ended when it hangs.

A kernel that reads where it may not spoils its process for every later call, and one that does not end cannot
be interrupted: so the process that measures is not the one that plans.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from importlib import import_module

from ..core.errors import Failed, describe
from ..core.ready import ours_first

START = 180.0  # seconds in which a process must have imported everything
MODULES = {  # stage -> its module
    "step": ".step", "attention": ".flash", "link": ".link",
    "headline": ".headline", "right": ".right",
}  # fmt: skip


def serve(connection, dry: bool) -> None:
    """Say what the machine is, then answer units until None comes; ends by itself when the device is
    spoiled. Messages: (kind, value, whether the process ends)."""
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    with contextlib.redirect_stdout(sys.stderr), contextlib.suppress(EOFError, OSError):
        try:
            import torch

            from .about import about
            from .bench import Bench

            if dry:
                torch.set_num_threads(1)
            bench = Bench(dry, lambda line: connection.send(("line", line, False)))
            connection.send(("done", about(dry), False))
            gc.collect()
            gc.freeze()  # what is imported stays: looking through it at every `tidy` takes half a second
        except Exception as error:
            connection.send(("failed", describe(error), True))
            return
        while (unit := connection.recv()) is not None:
            kind, value, spoiled = measured(bench, unit)
            connection.send((kind, value, spoiled))
            if spoiled:
                os._exit(1)  # whatever would still be given back would fail as well


def end_with(parent) -> None:
    """End this process, whatever it does, when the one that started it is gone: a GPU's memory is in use."""
    if parent is not None:
        parent.join()
        os._exit(1)


def measured(bench, unit) -> tuple[str, object, bool]:
    """("done", what its stage found) or ("failed", (line, traceback)), and whether the device is spoiled."""
    bench.said = []
    try:
        found = import_module(MODULES[unit.stage], __package__).measure(bench, **unit.given)
        answer = "done", found | {"notes": bench.said}
    except Exception as error:
        answer = "failed", describe(error)
        error.__traceback__ = None  # it holds on to tensors
    try:
        bench.tidy()
        bench.sync()
    except Exception as error:
        return *(answer if answer[0] == "failed" else ("failed", describe(error))), True
    return *answer, bench.spoiled


class Worker:
    """A process that measures, started when it is first asked. `say` gets the lines it says meanwhile."""

    def __init__(self, dry: bool, say):
        self.dry, self.say = dry, say
        self.process = None

    def about(self) -> dict:
        """What the process says of its machine. Raises Failed."""
        self._start(START)
        return self.machine

    def ask(self, unit, seconds: float) -> dict:
        """Measure a unit in at most so many seconds, with what starting a process takes; it is ended where it
        takes longer. Raises Failed."""
        end = time.monotonic() + seconds
        self._start(min(START, seconds))
        with contextlib.suppress(OSError):  # a process that has ended says so below
            self.connection.send(unit)
        return self._answer(seconds, end)

    def stop(self) -> None:
        """End the process."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            self.connection.send(None)
        self.process.join(0.2)
        self.process.kill()
        self.process.join(10)
        self.connection.close()
        self.process = None

    def _start(self, seconds: float) -> None:
        if self.process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.dry))
        with ours_first():
            self.process.start()
        theirs.close()
        self.machine = self._answer(seconds, time.monotonic() + seconds)

    def _answer(self, seconds: float, end: float) -> dict:
        """The next answer; lines that come before it are said."""
        kind, spoiled = "line", False
        while kind == "line":
            if not self.connection.poll(max(0.0, end - time.monotonic())):
                self.stop()
                raise Failed(f"it took longer than {seconds:.0f} s and was ended")
            try:
                kind, value, spoiled = self.connection.recv()
            except (EOFError, OSError):
                self.process.join(5)
                code = self.process.exitcode
                self.stop()
                raise Failed(f"its process ended by itself (exit code {code}; out of memory?)") from None
            if kind == "line":
                self.say(value)
        if spoiled:
            self.stop()
        if kind == "failed":
            raise Failed(*value)
        return value
