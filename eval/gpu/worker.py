"""Worker: the process that measures units, one after another; it is ended when it hangs.

A kernel that reads where it may not spoils its process for every later call, and one that does not end cannot
be interrupted: so the process that measures is not the one that plans.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module

from ..core import workers
from ..core.errors import Failed, describe

START = 180.0  # seconds in which a process must have imported everything
MODULES = {  # stage -> its module
    "step": ".step", "attention": ".flash", "link": ".link",
    "headline": ".headline", "right": ".right",
}  # fmt: skip


def setup(dry: bool, report: Callable) -> Callable:
    """A worker's handler: "about" -> what the machine is, a unit -> what `measured` says of it."""
    threading.Thread(target=end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    from .about import about
    from .bench import Bench

    bench = Bench(dry, lambda line: report(0, 1, line))
    gc.collect()
    gc.freeze()  # what is imported stays: looking through it at every `tidy` takes half a second
    return lambda unit: about(dry) if unit == "about" else measured(bench, unit)


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
        self.running: workers.Worker | None = None

    def about(self) -> dict:
        """What the process says of its machine. Raises Failed."""
        self._start(START)
        return self.machine

    def ask(self, unit, seconds: float) -> dict:
        """Measure a unit in at most so many seconds, with what starting a process takes; it is ended where it
        takes longer. Raises Failed."""
        end = time.monotonic() + seconds
        self._start(min(START, seconds))
        self.running.give(unit)
        kind, value, spoiled = self._answer(seconds, end)
        if spoiled:
            self.stop()
        if kind == "failed":
            raise Failed(*value)
        return value

    def stop(self) -> None:
        """End the process at once: whatever it would still give back may fail as well."""
        if self.running is not None:
            self.running.process.kill()
            self.running.stop()
            self.running = None

    def _start(self, seconds: float) -> None:
        if self.running is None:
            self.running = workers.Worker(__name__, self.dry, 1 if self.dry else None, "spawn")
            end = time.monotonic() + seconds
            self._answer(seconds, end)  # it is ready
            self.running.give("about")
            self.machine = self._answer(seconds, end)

    def _answer(self, seconds: float, end: float):
        """The next answer; lines that come before it are said."""
        while self.running.connection.poll(max(0.0, end - time.monotonic())):
            kind, value = self.running.take()
            if kind == "at":
                self.say(value[2])
            elif kind == "failed":
                self.stop()
                raise Failed(*value)
            else:
                return value
        self.stop()
        raise Failed(f"it took longer than {seconds:.0f} s and was ended")
