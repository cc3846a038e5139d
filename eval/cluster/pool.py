"""Pool on Ray: jobs go to actors that hold a loaded model, on this machine or on a cluster.

The queue is here and not in Ray: a job whose actor or node died goes to another actor, at most `TRIES` times
in all, and an actor that was lost is never asked again, so no job is done twice at a time. Results come back
to this process, which stores them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from kvlab.extras import needs
from kvlab.measure.host import cores

from ..core.digests import code_digest
from ..core.errors import Failed, Problem
from ..core.machine import versions
from ..core.ready import ours_first
from ..core.workers import Outcome

TRIES = 3
TICK = 1.0  # seconds between looks at what is alive
PROBE = 5.0  # seconds in which an address must answer
PATIENCE = 3  # failed checks of the head
ENDLESS = 10**9  # actors: of those that take nothing
STORE = 80 * 2**20  # bytes of Ray's object store: Ray's least, since jobs and answers are small
SHORT = 40  # letters of a temporary folder: the path of a socket has 107 bytes, most of them Ray's
ENVIRONMENT = {  # no reports to Ray's makers, the GPUs as they are, and more than Ray's 15 s for a busy node
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_agent_register_timeout_ms": "100000",
}


def place(text: str) -> str | None:
    """The address in `ray` or `ray:HOST:PORT` (None: a cluster of our own); Problem for anything else, where
    ray is not installed, and for an address that does not answer."""
    kind, colon, address = text.partition(":")
    if kind != "ray" or (colon and not address):
        raise Problem(f"--on {text}: expected ray, or ray:HOST:PORT")
    needs("ray")
    if not address:
        return None
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise Problem(f"--on {text}: expected ray:HOST:PORT, the address that `ray start --head` says")
    if not answers(address, PROBE):
        raise Problem(f"--on {text}: no answer from {address}")
    return address


def answers(address: str, timeout: float) -> bool:
    """Whether a server accepts connections there."""
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
        if self.address is None:  # before Ray is imported: all of it listens on 127.0.0.1, on Linux as well
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        import ray

        with joined(ray, self.address):
            yield from Queue(ray, self, maker, options).run(jobs, report)


@contextlib.contextmanager
def joined(ray, address: str | None) -> Iterator[None]:
    """This process as a driver of the cluster there, or of one of its own."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK"):
        os.environ.pop(name, None)
    logging.getLogger("ray").setLevel(logging.ERROR)
    folder = tempfile.mkdtemp(prefix="kr", dir=None if len(tempfile.gettempdir()) < SHORT else "/tmp")
    how = {"address": address, "log_to_driver": False, "configure_logging": False}
    if address is None:
        how |= {"address": "local", "num_cpus": cores(), "include_dashboard": False, "_temp_dir": folder}
        how |= {"object_store_memory": STORE}
    before, terminated = set(psutil.Process().children()), signal.getsignal(signal.SIGTERM)
    try:
        with ours_first():
            connect(ray, how)
        with contextlib.suppress(ValueError):  # not the main thread: signals are another's
            signal.signal(signal.SIGTERM, terminated)  # Ray takes it for itself
        yield
    except Gone:
        for started in set(psutil.Process().children()) - before:  # or Ray waits a minute for the head
            for process in (*started.children(recursive=True), started):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        raise
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def connect(ray, how: dict) -> None:
    """`ray.init`; a node of our own may need several tries: Ray gives it 30 s, which cannot be changed."""
    for left in reversed(range(TRIES)):
        try:
            ray.init(**how)
            return
        except Exception as error:
            ray.shutdown()
            if isinstance(error, ConnectionError) and how["address"] != "local":
                raise Failed(
                    f"--on ray:{how['address']}: it answers, but not us: its head must run Ray "
                    f"{ray.__version__}; where it has a token, have the same ~/.ray/auth_token here, and "
                    "export RAY_AUTH_MODE=token"
                ) from error
            if not left:
                raise


class Gone(Failed):
    """The head of the cluster is gone."""


class Queue:
    """The jobs that wait, and the actors at work."""

    def __init__(self, ray, pool: OnRay, maker: str, options):
        from .actor import Actor

        self.ray, self.pool, self.kind = ray, pool, ray.remote(Actor)
        expected = {"version": versions()["kvlab"], "code": code_digest()}
        self.about = maker, options, pool.threads, expected
        self.head = ray.get_runtime_context().gcs_address
        self.missed = 0  # looks in a row that found no head
        self.waiting: deque = deque()
        self.tries: Counter = Counter()
        self.running: dict = {}  # what Ray will answer -> (actor, its job; None while it sets itself up)
        self.unready = 0  # actors in a row that were lost before they were ready

    def run(self, jobs: Callable[[int], list], report: Callable) -> Iterator[Outcome]:
        """Until every job has an answer. Raises Failed where none of them could have one."""
        _, room = self.room()
        actors = 1 if self.pool.alone else self.pool.actors or room
        if actors > room:
            raise Failed(f"--actors {actors}: the cluster has room for {room} (see --cpus-per-actor)")
        self.waiting.extend(jobs(actors if actors < ENDLESS else 1))
        left, looked = len(self.waiting), 0.0
        while left:
            if time.monotonic() - looked > TICK or not self.running:
                self.look()
                looked = time.monotonic()
            if not self.running:
                time.sleep(TICK)
                continue
            for ref in self.ray.wait(list(self.running), timeout=TICK)[0]:
                if outcome := self.answer(ref, report):
                    left -= 1
                    yield outcome

    def look(self) -> None:
        """Is the head alive? And start as many actors as there may be, and as there are jobs."""
        self.missed = 0 if answers(self.head, TICK) else self.missed + 1
        if self.missed >= PATIENCE:
            raise Gone(f"the head of the Ray cluster at {self.head} is gone; the same command resumes")
        if self.missed:  # a call to it now waits for a minute
            return
        takes, room = self.room()
        at_work = sum(job is not None for _, job in self.running.values())
        enough = min(self.pool.actors or room, room, len(self.waiting) + at_work)
        for _ in range(enough - len(self.running)):
            how = {"num_cpus": takes["CPU"], "num_gpus": takes["GPU"], "max_restarts": 0}
            actor = self.kind.options(**how).remote(*self.about)
            self.running[actor.set_up.remote()] = actor, None

    def room(self) -> tuple[dict[str, float], int]:
        """An actor's resources, and how many actors the living nodes could hold if otherwise idle. Raises
        Failed where there is no room for one."""
        pool = self.pool
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        fit = [node for node in nodes if node.get("CPU") and node.get("GPU", 0) >= pool.gpus]
        cpus = [node["CPU"] for node in fit]
        usual = max(cpus, default=1) if pool.alone else min(cpus, default=1)
        takes = {"CPU": usual if pool.alone or pool.cpus is None else pool.cpus, "GPU": pool.gpus}
        asked = {name: amount for name, amount in takes.items() if amount}
        found = sum(
            min((int(node.get(name, 0) / amount + 1e-9) for name, amount in asked.items()), default=ENDLESS)
            for node in nodes
        )
        if not found:
            most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in takes}
            says = ", ".join(f"{takes[name]:g} {name}s, of at most {most[name]:g}" for name in takes)
            raise Failed(f"no living node has what an actor takes: {says} on one node")
        return takes, 1 if pool.alone else found

    def answer(self, ref, report: Callable) -> Outcome | None:
        """Take an answer and give its actor the next job; None where no job has come to its end by it."""
        actor, job = self.running.pop(ref)
        try:
            kind, value = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            kind, value = "lost", ("its actor was lost (out of memory?)", " ".join(str(error).split()))
        if kind in ("lost", "full"):  # its node, or this process, can do no more; another one can
            self.ray.kill(actor, no_restart=True)
            return self.lost(job, *value)
        self.unready = 0
        if kind == "failed" and job is None:
            raise Failed(*value)
        if self.waiting:
            new = self.waiting.popleft()
            self.tries[new] += 1
            name = self.pool.named(new)
            self.running[actor.do.options(name=name).remote(new, name)] = actor, new
            report(new, 0, 1)
        else:
            self.ray.kill(actor, no_restart=True)
        if job is None:
            return None
        if kind == "failed":
            return Outcome(job, Failed(*value), {"tries": self.tries[job]})
        found, about = value
        return Outcome(job, found, about | {"tries": self.tries[job]})

    def lost(self, job, line: str, details: str) -> Outcome | None:
        """What an actor did is done again elsewhere, unless that happened too often."""
        if job is None:
            self.unready += 1
            if self.unready >= TRIES:
                raise Failed(f"no actor could be started: ... {details[-240:]}")
        elif self.tries[job] < TRIES:
            self.waiting.appendleft(job)
        else:
            line = f"{line}, {TRIES} times, so it is not tried again"
            return Outcome(job, Failed(line, details), {"tries": TRIES})
        return None
