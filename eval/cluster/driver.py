"""Driver: the process that talks to Ray: it starts actors, keeps the queue, and gives lost jobs to others.

It is a process of its own, because Ray ends its driver when the head of the cluster is gone, prints what it
likes, and takes signals for itself. Jobs wait here and not in Ray: a job whose actor or node died goes back
to the front of the queue, at most `TRIES` times in all, and the actor that was lost is never asked again, so
no job is done twice at a time.

Messages to the pool: ("room", actors), which it answers with [(job, its name)], then ("up", (address,
actors)), ("at", (job, done, total)), ("done", (job, found, about)), ("failed", (job, (line, traceback),
tries)), ("refused", (line, traceback)), ("end", None).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import psutil

from ..core.errors import describe
from ..core.machine import cores

TRIES = 3
AGREEING = 60.0  # seconds in which nodes may say which kvlab they run
LEAVING = 10.0  # seconds after which a driver without its command ends all it started
TICK = 1.0  # seconds between looks at what is alive, and between questions where a job is
STOP = "stop"  # what the pool says when it wants no more
ENDLESS = 10**9  # actors: of those that take nothing
STORE = 80 * 2**20  # bytes of Ray's object store: Ray's least, since jobs and answers are small


@dataclass
class Plan:
    """What does jobs, and with what."""

    maker: str
    options: object
    threads: int | None
    expected: dict[str, str]
    address: str | None  # None: a cluster of our own on this machine
    actors: int | None
    cpus: float | None  # None: those of a whole node
    gpus: float
    alone: bool  # an actor takes a node for itself
    folder: str  # of Ray's own files, where the cluster is ours


@dataclass(eq=False)
class Seat:
    """An actor, and what it is asked at the moment."""

    actor: object
    job: int | None = None
    ready: bool = False
    asked: float = 0.0  # when it was last given a job, or asked where it is
    refs: set = field(default_factory=set)


class Refused(Exception):
    """The run cannot go on."""


def drive(connection, plan: Plan, log: str) -> None:
    """The process."""
    os.setsid()  # Ctrl-C is for the command, which tells us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    for name in ("RAY_ADDRESS", "RAY_NAMESPACE", "RAY_RUNTIME_ENV_HOOK"):
        os.environ.pop(name, None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    import ray

    try:
        _join(ray, plan)
        Driver(ray, connection, plan).run()
        connection.send(("end", None))
    except Refused as error:
        with contextlib.suppress(OSError):
            connection.send(("refused", (str(error), "")))
    except (EOFError, OSError):  # the command is gone
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(("refused", describe(error)))
    finally:
        ray.shutdown()
        sys.stdout.flush()


def _follow(command: int) -> None:
    """When the command was killed, nobody else ends what this process started."""
    while os.getppid() == command:
        time.sleep(TICK)
    time.sleep(LEAVING)  # the loop has noticed, unless Ray holds it up
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            child.kill()
    os._exit(1)


def _join(ray, plan: Plan) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error", "configure_logging": False}
    if plan.address is not None:
        try:
            ray.init(address=plan.address, **quiet)
        except ConnectionError as error:
            raise Refused(
                f"--on ray:{plan.address}: it answers, but not us: its head must run Ray {ray.__version__}; "
                "where it has a token, have the same ~/.ray/auth_token here, and export RAY_AUTH_MODE=token"
            ) from error
        return
    os.environ.setdefault("RAY_agent_register_timeout_ms", "100000")  # a busy machine; Ray's 15 s end a node
    for left in reversed(range(TRIES)):  # and so do its 30 s for a node, which nobody can change
        try:
            ray.init(
                address="local", num_cpus=cores(), include_dashboard=False, object_store_memory=STORE,
                _temp_dir=plan.folder, **quiet,
            )  # fmt: skip
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


class Driver:
    """The loop."""

    def __init__(self, ray, connection, plan: Plan):
        self.ray, self.connection, self.plan = ray, connection, plan
        self.jobs: list[tuple] = []  # (job, its name in Ray's dashboard)
        self.waiting: deque[int] = deque()
        self.tries: Counter[int] = Counter()
        self.left = 0  # jobs without an answer
        self.seats: list[Seat] = []
        self.spoiled = 0  # actors in a row that were lost before they were ready
        self.looked = 0.0
        self.kind = None  # Holder, as Ray knows it
        self.node: str | None = None  # the one node that actors go to

    # what the cluster has

    def agree(self) -> None:
        """Raises Refused where a node that lives runs another kvlab than the command. On a cluster of our own
        there is none."""
        from .holder import unlike

        plan, asked = self.plan, {}
        for node in self.nodes() if plan.address is not None else ():
            if node["Resources"].get("CPU"):  # actors may go there
                task = self.ray.remote(unlike).options(
                    num_cpus=0, max_retries=0, scheduling_strategy=self.on(node["NodeID"]), name="which kvlab"
                )
                ref = task.remote(plan.maker, plan.options, plan.expected)
                asked[ref] = node.get("NodeManagerHostname", node["NodeID"])
        until = time.monotonic() + AGREEING
        while asked and time.monotonic() < until and not self.connection.poll():
            for ref in self.ray.wait(list(asked), num_returns=1, timeout=TICK)[0]:
                name = asked.pop(ref)
                try:
                    line = self.ray.get(ref)
                except self.ray.exceptions.RayTaskError as error:  # it has none, or a much older one
                    line = f"node {name} has not this kvlab: {describe(error.cause)[0]}"
                except self.ray.exceptions.RayError:  # the node is gone, or too busy: its actors will say
                    continue
                if line:
                    raise Refused(line)

    def nodes(self) -> list[dict]:
        """Resources of the nodes that live."""
        return [node for node in self.ray.nodes() if node["Alive"]]

    def on(self, node: str):
        """What makes Ray start something on this node and no other."""
        return self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)

    def wanted(self) -> dict[str, float]:
        """What an actor takes."""
        plan, nodes = self.plan, self.nodes()
        if plan.alone:
            nodes = [node for node in nodes if node["Resources"].get("GPU", 0) >= plan.gpus]
            best = max(nodes, key=lambda node: node["Resources"].get("CPU", 0), default=None)
            self.node = best and best["NodeID"]
            return {"CPU": best["Resources"].get("CPU", 0) if best else 1, "GPU": plan.gpus}
        cpus = plan.cpus
        if cpus is None:
            cpus = min((n["Resources"]["CPU"] for n in nodes if n["Resources"].get("CPU")), default=1)
        return {"CPU": cpus, "GPU": plan.gpus}

    def room(self, wanted: dict[str, float]) -> int:
        """Actors that living nodes could hold, if nobody else took anything; as many as anybody asks for,
        where one takes nothing."""
        found = 0
        for node in self.nodes():
            if self.node in (None, node["NodeID"]):
                fits = [
                    math.floor(node["Resources"].get(name, 0) / amount + 1e-9)
                    for name, amount in wanted.items()
                    if amount
                ]
                found += min(fits, default=ENDLESS)
        return found

    def seat(self, wanted: dict[str, float]) -> None:
        """Ask for one more actor."""
        from .holder import CONCURRENT, Holder

        if self.kind is None:  # once: Ray reads and sends the class each time that it is told of one
            self.kind = self.ray.remote(Holder)
        how = {"num_cpus": wanted["CPU"], "num_gpus": wanted["GPU"], "max_concurrency": CONCURRENT}
        how |= {"max_restarts": 0, "max_task_retries": 0}
        if self.node is not None:
            how["scheduling_strategy"] = self.on(self.node)
        plan = self.plan
        actor = self.kind.options(**how).remote(plan.maker, plan.options, plan.threads, plan.expected)
        seat = Seat(actor)
        seat.refs.add(actor.set_up.remote())
        self.seats.append(seat)

    def places(self, wanted: dict[str, float]) -> int:
        """Actors that there may be at a time. Raises Refused where no living node has what one takes."""
        room = self.room(wanted)
        asked = self.plan.actors or room
        if room == 0:
            most = {
                name: max((n["Resources"].get(name, 0) for n in self.nodes()), default=0) for name in wanted
            }
            says = ", ".join(f"{wanted[name]:g} {name}s, of at most {most[name]:g}" for name in wanted)
            raise Refused(f"no living node has what an actor takes: {says} on one node")
        if not self.looked and asked > room:
            raise Refused(f"--actors {asked}: the cluster has room for {room} (see --cpus-per-actor)")
        return 1 if self.plan.alone else min(asked, room)

    def fill(self) -> None:
        """As many actors as there may be, and as there are jobs."""
        wanted = self.wanted()
        enough = min(self.places(wanted), self.left)
        while len(self.seats) < enough:
            self.seat(wanted)
        for seat in [seat for seat in self.seats if not seat.ready][
            : max(0, len(self.seats) - max(enough, 1))
        ]:
            self.drop(seat)  # it waits for a node that is gone, or for work that there is no more

    # the loop

    def run(self) -> None:
        """Until every job has an answer, or the command says stop (EOFError)."""
        self.agree()
        places = self.places(self.wanted())
        self.connection.send(("room", places if places < ENDLESS else 1))
        if (jobs := self.connection.recv()) == STOP:
            return
        self.jobs, self.left = jobs, len(jobs)
        self.waiting.extend(range(len(jobs)))
        self.fill()
        address = self.ray.get_runtime_context().gcs_address
        self.connection.send(("up", (address, len(self.seats))))
        while self.left:
            if self.connection.poll():
                self.connection.recv()
                return
            self.hand_out()
            refs = {ref: seat for seat in self.seats for ref in seat.refs}
            ready, _ = self.ray.wait(list(refs), num_returns=1, timeout=TICK)
            more, _ = self.ray.wait(list(refs), num_returns=len(refs), timeout=0) if ready else ([], [])
            for ref in more:
                if refs[ref] in self.seats:
                    self.answer(refs[ref], ref)
            if time.monotonic() - self.looked > TICK:
                self.fill()
                self.looked = time.monotonic()
        for seat in list(self.seats):
            self.drop(seat)

    def hand_out(self) -> None:
        now = time.monotonic()
        for seat in self.seats:
            if seat.ready and seat.job is None and self.waiting:
                seat.job = self.waiting.popleft()
                self.tries[seat.job] += 1
                job, name = self.jobs[seat.job]
                seat.refs.add(seat.actor.do.options(name=name).remote(seat.job, job, name))
                seat.asked = max(seat.asked, now)
            if now - seat.asked > TICK:  # while it loads its model too, or it takes itself for forgotten
                seat.asked = math.inf  # until it answers
                seat.refs.add(seat.actor.at.remote())

    def answer(self, seat: Seat, ref) -> None:
        seat.refs.discard(ref)
        try:
            found = self.ray.get(ref)
        except self.ray.exceptions.RayError as error:
            self.lost(seat, " ".join(str(error).split()), "its actor was lost (out of memory?)")
            return
        if len(found) == 3:  # where it is
            seat.asked = time.monotonic()
            if found[0] is not None and found[0] == seat.job:
                self.connection.send(("at", found))
            return
        kind, value = found
        if kind == "full":  # its node can do nothing more, another one can
            self.lost(seat, value[0], value[0])
        elif kind == "ready":
            seat.ready, self.spoiled = True, 0
        elif not seat.ready:
            line, _, node = value
            elsewhere = self.plan.address is not None and node not in line
            raise Refused(f"on node {node}: {line}" if elsewhere else line)
        else:
            job, seat.job = seat.job, None
            self.left -= 1
            tries = self.tries[job]
            if kind == "done":
                result, about = value
                self.connection.send(("done", (job, result, about | {"tries": tries})))
            else:
                self.connection.send(("failed", (job, value, tries)))

    def lost(self, seat: Seat, reason: str, line: str) -> None:
        """An actor died, its node did, its disk is full, or nobody knows: what it did is done again
        elsewhere. line: what is said of a job that was lost too often."""
        job, ready = seat.job, seat.ready
        self.drop(seat)
        if not ready:
            self.spoiled += 1
            if self.spoiled > TRIES:
                raise Refused(f"no actor could be started: {reason[:240]}")
        elif job is not None and self.tries[job] >= TRIES:
            self.left -= 1
            line = f"{line}, {TRIES} times, so it is not tried again"
            self.connection.send(("failed", (job, (line, reason), TRIES)))
        elif job is not None:
            self.waiting.appendleft(job)

    def drop(self, seat: Seat) -> None:
        """Let go of an actor, which shall do nothing more."""
        self.seats.remove(seat)
        with contextlib.suppress(Exception):
            self.ray.kill(seat.actor, no_restart=True)
