"""Pool on Ray: jobs go to actors that hold a loaded model, on this machine or on a cluster.

This process does not import ray: a driver of its own (`driver.py`) does. Here it is watched, and so is the
head of the cluster; when either is gone the run ends with one line, and the same command resumes. What the
driver started is ended with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import queue
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..core.digests import code_digest
from ..core.errors import Failed, Problem
from ..core.machine import versions
from ..core.workers import Outcome, ours_first
from .driver import STOP, Plan, drive

PROBE = 5.0  # seconds in which an address must answer
PATIENCE = 3  # looks at the head, a second apart, that find nobody
STARTING = 180.0  # seconds in which Ray must be up
LEAVING = 15.0  # seconds that the driver has to end what it started
SHORT = 40  # letters of a temporary folder: the path of a socket has 107 bytes, most of them Ray's


def place(text: str) -> str | None:
    """The address in `ray` or `ray:HOST:PORT` (None: a cluster of our own); Problem for anything else, where
    ray is not installed, and for an address that nobody answers."""
    kind, colon, address = text.partition(":")
    if kind != "ray" or (colon and not address):
        raise Problem(f"--on {text}: expected ray, or ray:HOST:PORT")
    if importlib.util.find_spec("ray") is None:
        raise Problem(f"--on {text}: ray is not installed; pip install 'kvlab[ray]'")
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise Problem(f"--on {text}: expected ray:HOST:PORT, the address that `ray start --head` says")
    if not answers(address, PROBE):
        raise Problem(f"--on {text}: nobody answers at {address}")
    return address


def answers(address: str, timeout: float) -> bool:
    """Does somebody take connections there?"""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class OnRay:
    """See the module's text.

    address: HOST:PORT of a cluster, None: one of our own, which ends with the run. actors: how many (None: as
    many as there is room for). cpus, gpus: what each takes (cpus None: all CPUs of a node). alone: one actor,
    which takes a whole node. named: what a job is called in Ray's dashboard.
    """

    address: str | None
    actors: int | None = None
    cpus: float | None = None
    gpus: float = 0
    alone: bool = False
    threads: int | None = None
    named: Callable[[object], str] = str

    def run(self, maker: str, options, jobs: Callable[[int], list], report: Callable) -> Iterator[Outcome]:
        """As `workers.Local.run`."""
        expected = {"kvlab": versions()["kvlab"], "code": code_digest()}
        folder = Path(
            tempfile.mkdtemp(prefix="kr", dir=None if len(tempfile.gettempdir()) < SHORT else "/tmp")
        )
        plan = Plan(
            maker, options, self.threads, expected, self.address, self.actors, self.cpus, self.gpus,
            self.alone, str(folder),
        )  # fmt: skip
        log = folder / "driver.log"
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(target=drive, args=(theirs, plan, str(log)), daemon=True)
        with ours_first():
            process.start()
        theirs.close()
        watch = Watch(process, connection)
        try:
            for kind, value in watch.messages():
                if kind == "room":
                    made = jobs(value)
                    connection.send([(job, self.named(job)) for job in made])
                elif kind == "at":
                    report(made[value[0]], *value[1:])
                elif kind == "done":
                    yield Outcome(made[value[0]], value[1], value[2])
                elif kind == "failed":
                    yield Outcome(made[value[0]], Failed(*value[1]), {"tries": value[2]})
                elif kind == "refused":
                    raise Failed(*value)
        except Gone as error:
            with contextlib.suppress(OSError):
                error.details = log.read_text(encoding="utf-8", errors="replace")
            raise
        finally:
            watch.end()
            shutil.rmtree(folder, ignore_errors=True)


class Gone(Failed):
    """The driver, or the head of its cluster, is gone."""


class Watch:
    """The driver's messages, and an eye on it and on the head of the cluster."""

    def __init__(self, process, connection):
        self.process, self.connection = process, connection
        self.head: str | None = None
        self.started: set[psutil.Process] = set()  # what the driver started, and these

    def messages(self) -> Iterator[tuple]:
        """Until the driver has ended. Raises Gone."""
        begun, silent, looked = time.monotonic(), 0, 0.0
        come: queue.Queue = queue.Queue()
        threading.Thread(target=self._hear, args=(come,), daemon=True).start()
        while True:
            with contextlib.suppress(queue.Empty):
                kind, value = come.get(timeout=1.0)
                if kind == "up":
                    self.head = value[0]
                if kind == "gone":
                    raise Gone("the driver on Ray ended by itself; the same command resumes")
                if kind == "end":
                    return
                yield kind, value
            if time.monotonic() - looked > 1.0:
                self.note()
                looked = time.monotonic()
                if self.head is None and looked - begun > STARTING:
                    raise Gone(f"Ray was not up after {STARTING:.0f} s")
                if self.head is not None:
                    silent = 0 if answers(self.head, 1.0) else silent + 1
                    if silent >= PATIENCE:
                        raise Gone(
                            f"the head of the Ray cluster at {self.head} is gone; the same command resumes"
                        )

    def _hear(self, come: queue.Queue) -> None:
        """Take in what comes: the driver, and all actors with it, shall not wait while a cell is stored."""
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    come.put(self.connection.recv())
        finally:
            come.put(("gone", None))

    def note(self) -> None:
        """Remember what the driver started: when it is dead nobody can say."""
        with contextlib.suppress(psutil.Error):
            self.started |= set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self) -> None:
        """End the driver, and what it left behind."""
        self.note()
        with contextlib.suppress(OSError):
            self.connection.send(STOP)
        self.process.join(LEAVING if self.head is None or answers(self.head, 1.0) else 0)
        self.note()
        self.process.kill()
        self.process.join(5)
        for left in self.started:
            with contextlib.suppress(psutil.Error):
                left.kill()
        psutil.wait_procs(self.started, timeout=5)
        self.connection.close()
