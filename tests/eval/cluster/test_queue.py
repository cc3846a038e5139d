"""The queue: who does a job again, on a Ray that answers at once and whose actors die when told to."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from types import SimpleNamespace

import pytest

from eval.__main__ import chosen, main
from eval.cluster.driver import Driver, Plan, Refused
from eval.cluster.holder import Holder, unlike
from eval.cluster.pool import Gone, Watch
from eval.core.errors import Failed
from eval.core.machine import machine, versions
from eval.core.measurement import run
from eval.core.results import Store
from eval.core.show import Show
from eval.core.workers import Outcome


class Lost(Exception):
    pass


class Raised(Lost):
    def __init__(self, cause):
        super().__init__()
        self.cause = cause


class Actor:
    def __init__(self, ray, how):
        self.ray, self.how, self.number = ray, how, next(ray.numbers)

    def __getattr__(self, what):
        def remote(*arguments):
            ref = object()
            self.ray.refs[ref] = self, what, arguments
            return ref

        def options(name):
            self.ray.named.append(name)
            return SimpleNamespace(remote=remote)

        return SimpleNamespace(remote=remote, options=options)


class Ray:
    """die(actor's number, what, arguments): does the actor die of it? nodes: [{CPU: , GPU: }]. runs(node's
    id): in which line its kvlab differs."""

    exceptions = SimpleNamespace(RayError=Lost, RayTaskError=Raised)
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
    )

    def __init__(self, nodes, die=lambda *_: False, answer=None, runs=lambda node: None):
        self.resources, self.die, self.answer, self.runs = nodes, die, answer or done, runs
        self.numbers, self.refs, self.killed, self.asked = itertools.count(), {}, [], []
        self.set_up = "ready", 1
        self.named: list[str] = []  # what jobs are called in Ray's dashboard
        self.seats: list[dict] = []  # with which options actors were asked for

    def nodes(self):
        return [{"Alive": True, "NodeID": str(i), "Resources": n} for i, n in enumerate(self.resources)]

    def remote(self, kind):
        def remote(how, arguments):
            if kind is not unlike:
                self.seats.append(how)
                return Actor(self, how)
            self.refs[ref := object()] = how["scheduling_strategy"], "unlike", arguments
            return ref

        return SimpleNamespace(
            options=lambda **how: SimpleNamespace(remote=lambda *arguments: remote(how, arguments))
        )

    def wait(self, refs, num_returns, timeout):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        actor, what, arguments = self.refs.pop(ref)
        if what == "unlike":
            return self.runs(actor)
        self.asked.append((actor.number, what, arguments))
        if self.die(actor.number, what, arguments):
            raise Lost("it died")
        if what == "set_up":
            return self.set_up
        if what == "at":
            return None, 0, 1
        return self.answer(arguments[1], actor.number)

    def kill(self, actor, no_restart):
        self.killed.append(actor.number)

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="127.0.0.1:1")


class Line:
    """A connection that answers with these jobs, and remembers what was sent."""

    def __init__(self, jobs=()):
        self.jobs, self.sent = list(jobs), []

    def recv(self):
        assert [message for message, _ in self.sent] == ["room"]
        return [(job, str(job)) for job in self.jobs]

    def send(self, message):
        self.sent.append(message)

    def poll(self):
        return False


def driven(ray, jobs, actors=None, cpus=1, gpus=0, alone=False, address=None) -> list:
    line = Line(jobs)
    plan = Plan("m", None, 1, {}, address, actors, cpus, gpus, alone, "")
    Driver(ray, line, plan).run()
    assert not alone or line.sent[0] == ("room", 1)
    return [message for message in line.sent if message[0] in ("done", "failed")]


def done(job, actor=None):
    return "done", (job * 10, {"node": "n"})


def test_every_job_is_done_once():
    ray = Ray([{"CPU": 2}, {"CPU": 2}], answer=done)
    found = driven(ray, range(9))
    assert sorted(value for _, value in found) == [
        (job, job * 10, {"node": "n", "tries": 1}) for job in range(9)
    ]
    assert sorted(a[1] for a in ray.asked if a[1] == "do") == ["do"] * 9
    assert sorted(ray.named) == [str(job) for job in range(9)]
    assert len(set(ray.killed)) == next(ray.numbers) <= 5  # all actors were let go


def test_a_lost_job_goes_to_another_actor_and_is_counted():
    ray = Ray([{"CPU": 2}], die=lambda actor, what, args: actor == 0 and what == "do", answer=done)
    found = {value[0]: value for _, value in driven(ray, range(4))}
    assert sorted(found) == [0, 1, 2, 3]
    assert sorted(value[2]["tries"] for value in found.values()) == [1, 1, 1, 2]
    assert [asked[0] for asked in ray.asked].count(0) <= 3 and 0 in ray.killed  # and it is not asked again


def test_a_job_is_lost_three_times_at_most():
    ray = Ray([{"CPU": 2}], die=lambda actor, what, args: what == "do" and args[1] == 1, answer=done)
    found = {value[0]: (kind, value) for kind, value in driven(ray, range(3))}
    kind, value = found[1]
    assert kind == "failed" and value[2] == 3
    assert value[1][0] == "its actor was lost (out of memory?), 3 times, so it is not tried again"
    assert sum(1 for asked in ray.asked if asked[1] == "do" and asked[2][1] == 1) == 3
    assert found[0][0] == found[2][0] == "done"


def test_an_actor_without_room_on_its_disk_is_not_asked_again():
    full = "full", ("x.arrow: No space left on device", "trace")
    ray = Ray([{"CPU": 1}, {"CPU": 1}], answer=lambda job, actor: full if actor == 0 else done(job))
    found = {value[0]: value for _, value in driven(ray, range(4))}
    assert sorted(value[2]["tries"] for value in found.values()) == [1, 1, 1, 2]
    assert [asked[:2] for asked in ray.asked].count((0, "do")) == 1 and 0 in ray.killed
    (told,) = driven(Ray([{"CPU": 1}], answer=lambda job, actor: full), [5])
    assert told[0] == "failed" and told[1][1][0] == f"{full[1][0]}, 3 times, so it is not tried again"


def test_an_error_of_the_job_itself_is_not_tried_again():
    ray = Ray([{"CPU": 1}], answer=lambda job, actor: ("failed", ("no such thing", "trace")))
    assert driven(ray, [5]) == [("failed", (0, ("no such thing", "trace"), 1))]


def test_an_actor_is_asked_where_it_is_while_it_loads_its_model():
    """One that nobody asks ends itself (`holder.ORPHANED`), however long its model takes."""
    ray = Ray([{"CPU": 1}], answer=done)
    waited = ray.wait

    def wait(refs, num_returns, timeout):
        loading = [ref for ref in refs if ray.refs[ref][1] == "set_up"]
        others = [ref for ref in refs if ref not in loading]
        return waited(others if others else refs, num_returns, timeout)

    ray.wait = wait
    driven(ray, range(2))
    kinds = [what for _, what, _ in ray.asked]
    assert kinds.index("at") < kinds.index("set_up") < kinds.index("do")


def test_actors_that_never_start_end_the_run():
    ray = Ray([{"CPU": 2}], die=lambda actor, what, args: what == "set_up")
    with pytest.raises(Refused, match="no actor could be started: it died"):
        driven(ray, range(3))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"gpus": 1}, "no living node has what an actor takes: 1 CPUs, of at most 2, 1 GPUs, of at most 0"),
        ({"cpus": 3}, "3 CPUs, of at most 2"),
        ({"actors": 9}, "--actors 9: the cluster has room for 4"),
        ({"gpus": 1, "alone": True}, "no living node"),
    ],
)
def test_what_no_node_can_serve_is_refused(how, said):
    with pytest.raises(Refused, match=said):
        driven(Ray([{"CPU": 2}, {"CPU": 2}]), range(9), **how)


def test_a_cluster_that_has_lost_its_nodes_is_refused():
    """The last node with a GPU dies with a job: what is left waits for nobody."""
    nodes = [{"CPU": 2}, {"CPU": 2, "GPU": 1}]

    def die(actor, what, args):
        if what == "do" and len(nodes) == 2:
            nodes.pop()
            return True
        return False

    with pytest.raises(Refused, match="no living node has what an actor takes"):
        driven(Ray(nodes, die, done), range(3), gpus=1)


# which kvlab


def none_there(node):
    raise Raised(ModuleNotFoundError("No module named 'eval'"))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (lambda node: "node n runs another kvlab" if node == "1" else None, "^node n runs another kvlab$"),
        (none_there, "^node 0 has not this kvlab: ModuleNotFoundError: No module named 'eval'$"),
    ],
)
def test_a_node_with_another_kvlab_is_refused_before_work_begins(runs, said):
    ray = Ray([{"CPU": 2}, {"CPU": 2}], runs=runs)
    with pytest.raises(Refused, match=said):
        driven(ray, range(9), address="127.0.0.1:1")
    assert not ray.seats and not ray.asked


def test_a_node_that_does_no_work_may_run_any_kvlab():
    ray = Ray([{"CPU": 0}, {"CPU": 2}], runs=lambda node: "another" if node == "0" else None)
    assert len(driven(ray, range(3), address="127.0.0.1:1")) == 3


def test_a_node_that_is_lost_meanwhile_is_no_reason():
    def runs(node):
        raise Lost("it died")

    assert len(driven(Ray([{"CPU": 2}], runs=runs), range(3), address="127.0.0.1:1")) == 3


@pytest.mark.parametrize("field", ["kvlab", "code"])
def test_a_holder_knows_its_kvlab(field, monkeypatch):
    """A node that joined later is known when an actor is set up there."""
    monkeypatch.setattr(Holder, "_watch", lambda self: None)  # this process is no actor's: nobody ends it
    options = SimpleNamespace(code=lambda maker: "0123", device="cpu")
    same = {"kvlab": versions()["kvlab"], "code": "0123"}
    assert unlike("m", options, same) is None
    line = unlike("m", options, same | {field: "another"})
    assert line.startswith("node ") and "runs another kvlab (version " in line and "\n" not in line
    kind, (said, *_) = Holder("m", options, 0, same | {field: "another"}).set_up()
    assert (kind, said) == ("failed", line)


@pytest.mark.parametrize(("address", "said"), [(None, "^no model$"), ("h:1", "^on node n2: no model$")])
def test_a_node_where_no_actor_can_be_set_up_is_named(address, said):
    ray = Ray([{"CPU": 1}])
    ray.set_up = "failed", ("no model", "trace", "n2")
    with pytest.raises(Refused, match=said):
        driven(ray, range(3), address=address)


def test_half_of_a_gpu_and_whole_nodes():
    assert Driver(Ray([{"CPU": 4, "GPU": 2}]), Line(), plan(gpus=0.5)).room({"CPU": 1, "GPU": 0.5}) == 4
    whole = Driver(Ray([{"CPU": 4}, {"CPU": 8}]), Line(), plan(cpus=None))
    assert whole.wanted() == {"CPU": 4, "GPU": 0} and whole.room(whole.wanted()) == 3
    alone = Driver(Ray([{"CPU": 4}, {"CPU": 8}]), Line(), plan(alone=True))
    assert alone.wanted()["CPU"] == 8 and alone.node == "1" and alone.room(alone.wanted()) == 1


def plan(**how) -> Plan:
    named = {"cpus": 1, "gpus": 0, "actors": None, "alone": False} | how
    return Plan("m", None, 1, {}, None, folder="", **named)


# the messages


def test_a_driver_does_not_wait_while_cells_are_stored():
    """A pipe holds 64 kB; the driver has sent all of its answers when the first are being stored."""
    ours, theirs = multiprocessing.Pipe()

    def send():
        for number in range(2000):
            theirs.send(("done", (number, "x" * 1000, {})))
        theirs.send(("end", None))

    driver = threading.Thread(target=send, daemon=True)
    driver.start()
    found = []
    for _, value in Watch(SimpleNamespace(pid=os.getpid()), ours).messages():
        found.append(value[0])
        if len(found) == 200:
            driver.join(60)
            assert not driver.is_alive()
    assert found == list(range(2000))


def test_what_a_driver_said_before_it_died_is_heard():
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("done", (0, "", {})))
    theirs.close()
    messages = Watch(SimpleNamespace(pid=os.getpid()), ours).messages()
    assert next(messages)[0] == "done"
    with pytest.raises(Gone, match="the same command resumes"):
        next(messages)


# what the cells say


THEIRS = machine(threads=1) | {"cpu": "theirs"}


class Answers:
    """A pool that has done everything elsewhere."""

    def __init__(self, found):
        self.found = found

    def run(self, maker, options, jobs, report):
        for job in jobs(2):
            report(job, 1, 2)
            yield Outcome(job, self.found(job), {"tries": 2, "node": "n2", "machine": THEIRS})


def test_cells_say_where_and_in_how_many_tries(folder, tmp_path, monkeypatch, capsys):
    def found(job):
        if job[0] == "chain":
            return Failed("lost")
        metric = {"metric": "acc", "value": 0.5, "stderr": None, "n": 2, "higher_is_better": True}
        held = {"device_bytes": 8.0, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 1}
        numbers = {"metrics": [metric], "values": {"acc": [1.0, 0.0]}, "bytes": held, "seconds": 1.0}
        return {method: numbers | {"device": "cpu"} for method in job[1]}

    words = ["accuracy", "--model", str(folder), "--methods", "full", "int8", "--tasks", "recall", "chain"]
    (measurement,) = chosen([*words, "--out", str(tmp_path)])
    monkeypatch.setattr(type(measurement), "pool", lambda self, named: Answers(found))
    assert main([*words, "--out", str(tmp_path)]) == 1
    cells = list(Store(tmp_path).records())
    assert [(c["method"], c["tries"], c["node"], c["machine"]) for c in cells] == [
        (method, 2, "n2", THEIRS) for method in ("full", "int8")
    ]
    assert "failed: int8 on chain: lost" in capsys.readouterr().err


def test_jobs_are_called_by_methods_task_and_protocol():
    (sweep,) = chosen(["accuracy"])
    assert sweep.called(("chain", ("full", "int8"))) == "full, int8 · chain · question-inside"
    many = tuple(f"h2o:budget={number}" for number in range(1, 121))
    said = "h2o:budget=1, h2o:budget=2, h2o:budget=3, 117 more · chain · question-inside"
    assert sweep.called(("chain", many)) == said


@pytest.mark.parametrize("noisy", [False, True])
def test_speed_cells_have_a_node_for_themselves_or_say_that_they_had_not(
    folder, tmp_path, monkeypatch, noisy
):
    """A job is a context, with all methods; the one that failed is a line, and the others are kept."""
    words = ["speed", "--model", str(folder), "--methods", "full", "int8", "--on", "ray", "--limit", "1"]
    (speed,) = chosen([*words, "--out", str(tmp_path), *(["--allow-noisy"] if noisy else [])])
    asked = []

    def found(job):
        numbers = {"rows": [{"decode_ms": 1.0}], "seconds": 1.0, "device": "cpu"}
        return [(cell, Failed("lost") if cell.method == "int8" else numbers) for cell in job]

    def pool(self, named, alone):
        asked.append(alone)
        return Answers(found)

    monkeypatch.setattr(type(speed), "pool", pool)
    store = Store(tmp_path)
    store.prepare()
    show = Show(tmp_path)
    assert run(speed, store, show) == 1
    assert asked == [not noisy]
    cells = list(store.records())
    assert {cell["method"] for cell in cells} == {cell.method for cell in speed.cells()} - {"int8"}
    assert {(cell["alone"], cell["tries"], cell["node"]) for cell in cells} == {(not noisy, 2, "n2")}
