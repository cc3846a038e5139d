"""Worker processes that hold a loaded model and do one job after another.

A pool has one method, `run(maker, options, jobs, report)`. It asks `jobs(workers)` for the list of jobs, once
it knows how many workers there are, and yields an `Outcome` for every job as it is finished. `Local` is the
pool of this machine, `cluster.pool.OnRay` the other one.

A worker is started through forkserver with torch, transformers, lm-eval and kvlab already imported,
so the second and all later ones start in a fraction of a second (one for a GPU by spawn, with nothing
imported). It ignores Ctrl-C: the parent
decides, keeps what is finished and stops it. `maker` names a module with `setup(options, report)
-> handler`; a handler is `handler(job) -> result`; `report(done, total)` says how far the current job
is, `report(0, 1, text)` what it, or its set-up, is at. Only the process that computes imports the maker.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import wait

from .errors import Failed, describe
from .ready import get_ready, ours_first


@dataclass(frozen=True)
class Outcome:
    """A job, what it found (or Failed), and what its cells are to say besides: where, in how many tries."""

    job: object
    found: object
    about: dict = field(default_factory=dict)


def quiet(threads: int | None = None) -> None:
    """No progress bars, no chatter of libraries; `threads` for torch in this process."""
    os.environ["TQDM_DISABLE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("lm_eval", "transformers", "datasets", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if threads:
        import torch

        torch.set_num_threads(threads)


def _serve(connection, maker: str, options, threads) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leave in order: semaphores are given back
    quiet(threads)

    def tell(kind: str, value) -> None:
        try:
            connection.send((kind, value))
        except OSError:  # the parent is gone; the job would report this as its own error
            os._exit(1)

    with contextlib.redirect_stdout(sys.stderr):
        try:
            setup = import_module(maker).setup
            handler = setup(options, lambda *how: tell("at", how))
        except Exception as error:
            tell("failed", describe(error))
            return
        tell("ready", "ready")
        with contextlib.suppress(EOFError, ConnectionResetError):  # the parent is gone
            while (job := connection.recv()) is not None:
                try:
                    found = "done", handler(job)
                except Exception as error:
                    found = "failed", describe(error)
                tell(*found)


class Worker:
    """One process. `give(job)` starts a job, `take()` waits for the next message of any kind."""

    def __init__(self, maker: str, options, threads: int | None = None, start: str = "forkserver"):
        if start == "forkserver":
            get_ready()
        context = multiprocessing.get_context(start)
        self.options = options
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, maker, options, threads), daemon=True)
        with ours_first():
            self.process.start()
        theirs.close()
        self.job, self.busy = None, True

    def give(self, job) -> None:
        self.job, self.busy = job, True
        with contextlib.suppress(OSError):  # when the process has ended, `take` says so
            self.connection.send(job)

    def take(self) -> tuple[str, object]:
        try:
            kind, value = self.connection.recv()
            self.busy = kind == "at"
            return kind, value
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            code = self.process.exitcode
            line = f"the worker process ended by itself (exit code {code}; out of memory?)"
            return "failed", (line, line)

    def finish(self) -> object:
        """Wait for the current job's (or the setup's) end; raises Failed."""
        while True:
            kind, value = self.take()
            if kind == "failed":
                raise Failed(*value)
            if kind in ("done", "ready"):
                return value

    def ask(self, job) -> object:
        """Do one job and return its result; raises Failed."""
        self.give(job)
        return self.finish()

    def stop(self) -> None:
        """End the process: an idle one leaves by itself, a busy one loses what it was doing."""
        if not self.busy:
            with contextlib.suppress(OSError):
                self.connection.send(None)
            self.process.join(5)
        self.process.terminate()
        self.process.join(5)
        self.process.kill()
        self.process.join(5)
        self.connection.close()


class Here:
    """What a Worker is, without a process: used where one is enough, and to look inside."""

    def __init__(self, maker: str, options, threads: int | None = None, report=lambda *how: None):
        quiet(threads)
        self._setup = lambda: import_module(maker).setup(options, report)
        self._handler: Callable | None = None

    def finish(self) -> None:
        self._handler = self._try(self._setup)

    def ask(self, job) -> object:
        return self._try(self._handler, job)

    def stop(self) -> None:
        self._handler = None

    @staticmethod
    def _try(function: Callable, *arguments) -> object:
        try:
            return function(*arguments)
        except Exception as error:
            raise Failed(*describe(error)) from error


@dataclass(frozen=True)
class Local:
    """The pool of this machine: `count` worker processes (0: this one), with `threads` of torch each; with
    `devices`, one process for each, whose options have its `device`."""

    count: int
    threads: int | None = None
    devices: tuple[str, ...] = ()

    def run(self, maker: str, options, jobs: Callable[[int], list], report: Callable) -> Iterator[Outcome]:
        """Yield the jobs' outcomes as they are finished.

        A setup that fails raises Failed, as it would fail for every job. `report(job, done, total)`, or
        `report(job, 0, 1, text)`; job is None while a worker sets itself up.
        """
        several = [copy.copy(options) for _ in self.devices] or [options] * self.count
        for one, device in zip(several, self.devices):
            one.device = device
        waiting = list(jobs(max(1, len(several))))
        if not several:
            yield from self._run_here(maker, options, waiting, report)
            return
        workers = [Worker(maker, one, self.threads) for one in several[: len(waiting)]]
        busy = {worker.connection: worker for worker in workers}
        try:
            while busy:
                for connection in wait(list(busy)):
                    worker = busy[connection]
                    kind, value = worker.take()
                    if kind == "at":
                        report(worker.job, *value)
                        continue
                    if kind == "failed" and worker.job is None:
                        raise Failed(*value)
                    if kind != "ready":
                        yield Outcome(worker.job, Failed(*value) if kind == "failed" else value)
                    if not worker.process.is_alive():
                        worker.stop()
                        del busy[connection]
                        if waiting:
                            workers.append(Worker(maker, worker.options, self.threads))
                            busy[workers[-1].connection] = workers[-1]
                    elif waiting:
                        worker.give(waiting.pop(0))
                    else:
                        del busy[connection]
        finally:
            for worker in workers:
                worker.stop()

    def _run_here(self, maker: str, options, jobs: list, report: Callable) -> Iterator[Outcome]:
        job = None
        here = Here(maker, options, self.threads, lambda *how: report(job, *how))
        here.finish()
        for job in jobs:
            try:
                result = here.ask(job)
            except Failed as error:
                result = error
            yield Outcome(job, result)
