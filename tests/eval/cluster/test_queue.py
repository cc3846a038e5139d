"""The queue: who does a job again, on a Ray that answers at once and whose actors die when told to."""

import itertools
from types import SimpleNamespace

import pytest

from eval.cluster import pool
from eval.cluster.actor import Actor
from eval.cluster.options import pieces
from eval.cluster.pool import Gone, OnRay, Queue
from eval.command import chosen, main
from eval.core.digests import code_digest
from eval.core.errors import Failed
from eval.core.machine import machine, versions
from eval.core.results import Store
from eval.core.workers import Outcome

OPTIONS = SimpleNamespace(device="cpu")


class Lost(Exception):
    pass


class Remote:
    """An actor as Ray shows it."""

    def __init__(self, ray):
        self.ray, self.number = ray, next(ray.numbers)

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
    """die(actor's number, what, arguments): does the actor die of it? nodes: [{CPU: , GPU: }]."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, nodes, die=lambda *_: False, answer=None):
        self.resources, self.die, self.answer_of = nodes, die, answer or done
        self.numbers, self.refs, self.killed, self.asked = itertools.count(), {}, [], []
        self.set_up = "ready", None
        self.named: list[str] = []  # what jobs are called in Ray's dashboard
        self.started: list[dict] = []  # with which options actors were asked for

    def nodes(self):
        return [{"Alive": True, "NodeID": str(i), "Resources": n} for i, n in enumerate(self.resources)]

    def remote(self, kind):
        def options(**how):
            self.started.append(how)
            return SimpleNamespace(remote=lambda *about: Remote(self))

        return SimpleNamespace(options=options)

    def wait(self, refs, timeout):
        assert refs
        return refs[:1], refs[1:]

    def get(self, ref):
        actor, what, arguments = self.refs.pop(ref)
        self.asked.append((actor.number, what, arguments))
        if self.die(actor.number, what, arguments):
            raise Lost("it died")
        return self.set_up if what == "set_up" else self.answer_of(arguments[0], actor.number)

    def kill(self, actor, no_restart):
        self.killed.append(actor.number)

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="127.0.0.1:1")


@pytest.fixture(autouse=True)
def head(monkeypatch):
    """Answers of the head, the last one for ever."""
    found = [True]
    monkeypatch.setattr(pool, "answers", lambda *_: found.pop(0) if len(found) > 1 else found[0])
    monkeypatch.setattr(pool, "TICK", 0.0)
    return found


def driven(ray, jobs, **how) -> dict:
    """{job: its outcome}"""
    told = []
    queue = Queue(ray, OnRay(None, **{"cpus": 1} | how), "m", OPTIONS)
    found = list(queue.run(lambda workers: list(jobs), lambda job, done, total: told.append(job)))
    assert len({one.job for one in found}) == len(found) and set(told) == set(jobs)
    return {one.job: one for one in found}


def done(job, actor=None):
    return "done", (job * 10, {"node": "n"})


def test_every_job_is_done_once():
    ray = Ray([{"CPU": 2}, {"CPU": 2}])
    found = driven(ray, range(9))
    assert sorted(found) == list(range(9)) and sorted(ray.named) == [str(job) for job in range(9)]
    assert all(one.found == job * 10 for job, one in found.items())
    assert all(one.about == {"node": "n", "tries": 1} for one in found.values())
    assert [what for _, what, _ in ray.asked].count("do") == 9 and len(ray.started) == 4
    assert driven(Ray([{"CPU": 2}]), []) == {}


def test_a_lost_job_goes_to_another_actor_and_is_counted():
    ray = Ray([{"CPU": 2}], die=lambda actor, what, args: actor == 0 and what == "do")
    found = driven(ray, range(4))
    assert sorted(one.about["tries"] for one in found.values()) == [1, 1, 1, 2]
    assert 0 in ray.killed and [asked[:2] for asked in ray.asked].count((0, "do")) == 1


def test_a_job_is_lost_three_times_at_most():
    found = driven(Ray([{"CPU": 2}], die=lambda actor, what, args: args[:1] == (1,)), range(3))
    assert str(found[1].found) == "its actor was lost (out of memory?), 3 times, so it is not tried again"
    assert found[1].about == {"tries": 3} and [found[job].found for job in (0, 2)] == [0, 20]


def test_an_actor_without_room_on_its_disk_is_not_asked_again():
    full = "full", ("x.arrow: No space left on device", "trace")
    ray = Ray([{"CPU": 1}, {"CPU": 1}], answer=lambda job, actor: full if actor == 0 else done(job))
    found = driven(ray, range(4))
    assert sorted(one.about["tries"] for one in found.values()) == [1, 1, 1, 2]
    assert [asked[:2] for asked in ray.asked].count((0, "do")) == 1 and 0 in ray.killed
    (one,) = driven(Ray([{"CPU": 1}], answer=lambda job, actor: full), [5]).values()
    assert str(one.found) == f"{full[1][0]}, 3 times, so it is not tried again"


def test_a_head_is_gone_when_it_misses_three_looks(head):
    head[:] = [True, False, False, True]
    assert len(driven(Ray([{"CPU": 1}]), range(9))) == 9
    head[:] = [True, False]
    with pytest.raises(Gone, match="the same command resumes"):
        driven(Ray([{"CPU": 1}]), range(9))


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
    with pytest.raises(Failed, match=said):
        driven(Ray([{"CPU": 2}, {"CPU": 2}]), range(9), **how)


def test_a_cluster_that_has_lost_its_nodes_is_refused():
    """The last node with a GPU dies with a job: what is left waits for nobody."""
    nodes = [{"CPU": 2}, {"CPU": 2, "GPU": 1}]

    def die(actor, what, args):
        return what == "do" and len(nodes) == 2 and bool(nodes.pop())

    with pytest.raises(Failed, match="no living node has what an actor takes"):
        driven(Ray(nodes, die), range(3), gpus=1)


def test_a_node_with_another_kvlab_is_refused_in_one_line(monkeypatch):
    monkeypatch.setattr("eval.cluster.actor.quiet", lambda threads: None)
    same = {"version": versions()["kvlab"], "code": code_digest()}
    for field in same:
        kind, (line, _) = Actor("m", OPTIONS, 0, same | {field: "another"}).set_up()
        assert kind == "failed" and line.startswith("on node ") and "it runs another kvlab" in line


def test_jobs_are_cut_into_as_many_as_leave_no_worker_idle():
    methods = tuple("abcde")
    whole = [("x", methods), ("y", methods[:1])]
    assert pieces(whole, 1) == pieces(whole, 3) == whole and pieces([], 4) == []
    assert pieces(whole, 4) == [("x", ("a", "c", "e")), ("x", ("b", "d")), ("y", ("a",))]
    assert len(pieces(whole, 64)) == 6


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
