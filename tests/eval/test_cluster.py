"""Sweeps on Ray: what is refused, who does a job again, and the same table under every fault.

Tests that are marked `ray` start clusters: `make test-ray`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml

from eval.__main__ import chosen, main
from eval.cluster import driver, hours, pool
from eval.cluster.driver import Driver, Plan, Refused
from eval.core.errors import Failed, Problem
from eval.core.machine import machine
from eval.core.results import Store
from eval.core.workers import Outcome

ROOT = Path(__file__).resolve().parents[2]
INSTALLED = importlib.util.find_spec("ray") is not None


def refused(capsys, *words: str) -> str:
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "slurm"], "expected ray, or ray:HOST:PORT"),
        (["--on", "ray:"], "expected ray, or ray:HOST:PORT"),
        (["--actors", "2"], "--actors: needs --on ray"),
        (["--gpus-per-actor", "-1"], "not a number of at least 0"),
        (["--cpus-per-actor", "nan"], "not a number of at least 0"),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, "accuracy", *words)
    assert not list(tmp_path.iterdir())


def test_ray_that_is_not_installed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool.importlib.util, "find_spec", lambda name: None)
    assert refused(capsys, "accuracy", "--on", "ray").endswith("pip install 'kvlab[ray]'")


def test_an_address_that_nobody_answers(monkeypatch):
    monkeypatch.setattr(pool.importlib.util, "find_spec", lambda name: True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(Problem, match="nobody answers"):
            pool.place(f"ray:{address}")
        free.listen()
        assert pool.place(f"ray:{address}") == address
    for wrong in ("ray:here", "ray:here:port", "ray:here:99999"):
        with pytest.raises(Problem, match="HOST:PORT"):
            pool.place(wrong)


def test_ray_is_not_imported_without_being_asked_for():
    script = "import sys, eval.__main__, eval.cluster.pool; print('ray' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


# the queue, on a Ray that answers at once and whose actors die when they are told to


class Lost(Exception):
    pass


class Actor:
    def __init__(self, ray, how):
        self.ray, self.how, self.number = ray, how, next(ray.numbers)

    def __getattr__(self, what):
        def remote(*arguments):
            ref = object()
            self.ray.refs[ref] = self, what, arguments
            return ref

        return SimpleNamespace(remote=remote, options=lambda **_: SimpleNamespace(remote=remote))


class Ray:
    """die(actor's number, what, arguments): does the actor die of it? nodes: [{CPU: , GPU: }]."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, nodes, die=lambda *_: False, answer=lambda job: job * 10):
        self.resources, self.die, self.answer = nodes, die, answer
        self.numbers, self.refs, self.killed, self.asked = itertools.count(), {}, [], []

    def nodes(self):
        return [{"Alive": True, "NodeID": str(i), "Resources": n} for i, n in enumerate(self.resources)]

    def remote(self, kind):
        return SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *_: Actor(self, how)))

    def wait(self, refs, num_returns, timeout):
        return refs[:num_returns], refs[num_returns:]

    def get(self, ref):
        actor, what, arguments = self.refs.pop(ref)
        self.asked.append((actor.number, what, arguments))
        if self.die(actor.number, what, arguments):
            raise Lost("it died")
        if what == "set_up":
            return "ready", 1
        if what == "at":
            return None, 0, 1
        return self.answer(arguments[1]) if callable(self.answer) else self.answer

    def kill(self, actor, no_restart):
        self.killed.append(actor.number)

    def get_runtime_context(self):
        return SimpleNamespace(gcs_address="127.0.0.1:1")


class Line:
    """A connection that remembers what was sent."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    def poll(self):
        return False


def driven(ray, jobs, actors=None, cpus=1, gpus=0, alone=False) -> list:
    line = Line()
    plan = Plan("m", None, list(jobs), [str(j) for j in jobs], 1, {}, None, actors, cpus, gpus, alone, "")
    Driver(ray, line, plan).run()
    return [message for message in line.sent if message[0] in ("done", "failed")]


def done(job):
    return "done", (job * 10, {"node": "n"})


def test_every_job_is_done_once():
    ray = Ray([{"CPU": 2}, {"CPU": 2}], answer=done)
    found = driven(ray, range(9))
    assert sorted(value for _, value in found) == [
        (job, job * 10, {"node": "n", "tries": 1}) for job in range(9)
    ]
    assert sorted(a[1] for a in ray.asked if a[1] == "do") == ["do"] * 9
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
    assert kind == "failed" and value[2] == 3 and "lost 3 times" in value[1][0]
    assert sum(1 for asked in ray.asked if asked[1] == "do" and asked[2][1] == 1) == 3
    assert found[0][0] == found[2][0] == "done"


def test_an_error_of_the_job_itself_is_not_tried_again():
    ray = Ray([{"CPU": 1}], answer=lambda job: ("failed", ("no such thing", "trace")))
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


def test_half_of_a_gpu_and_whole_nodes():
    assert Driver(Ray([{"CPU": 4, "GPU": 2}]), Line(), plan(gpus=0.5)).room({"CPU": 1, "GPU": 0.5}) == 4
    whole = Driver(Ray([{"CPU": 4}, {"CPU": 8}]), Line(), plan(cpus=None))
    assert whole.wanted() == {"CPU": 4, "GPU": 0} and whole.room(whole.wanted()) == 3
    alone = Driver(Ray([{"CPU": 4}, {"CPU": 8}]), Line(), plan(alone=True))
    assert alone.wanted()["CPU"] == 8 and alone.node == "1" and alone.room(alone.wanted()) == 1


def plan(**how) -> Plan:
    named = {"cpus": 1, "gpus": 0, "actors": None, "alone": False} | how
    return Plan("m", None, [0], ["0"], 1, {}, None, folder="", **named)


# what the cells say


THEIRS = machine(threads=1) | {"cpu": "theirs"}


class Answers:
    """A pool that has done everything elsewhere."""

    def __init__(self, found):
        self.found = found

    def run(self, maker, options, jobs, report):
        for job in jobs:
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


# clusters

ray = pytest.mark.ray
needs_ray = pytest.mark.skipif(not INSTALLED, reason="ray is not installed (make test-ray installs it)")


def environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_agent_register_timeout_ms": "100000"}


@pytest.fixture
def sweep(folder, tmp_path):
    """Words of a sweep of six cells in three jobs, and its table."""
    methods = ["full", "sinks:budget=0.5"]
    words = ["accuracy", "--model", str(folder), "--limit", "2", "--methods", *methods]
    return [*words, "--tasks", "recall", "chain", "agreement"]


def started(*words: str, cwd=None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "eval", *words], cwd=ROOT, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def table(out: Path) -> list:
    """What must be the same digit by digit."""
    cells = Store(out).records()
    return [(c["method"], c["task"], c["config"], c["metrics"], c["values"], c["bytes"]) for c in cells]


@pytest.fixture
def local(sweep, tmp_path):
    assert main([*sweep, "--jobs", "1", "--out", str(tmp_path / "local")]) == 0
    return table(tmp_path / "local")


def rays() -> set[int]:
    """Processes of Ray's on this machine."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        text = " ".join(process.info["cmdline"] or ())
        if any(word in text for word in ("raylet", "gcs_server", "ray::", "ray/dashboard")):
            found.add(process.pid)
    return found


@ray
@needs_ray
@pytest.mark.slow
def test_the_table_is_the_local_one_and_nothing_is_left(sweep, local, tmp_path):
    before, folders = rays(), set(Path("/tmp").glob("kr*"))
    run = started(*sweep, "--on", "ray", "--actors", "2", "--out", str(tmp_path / "out"))
    _, said = run.communicate(timeout=500)
    assert run.returncode == 0, said
    assert table(tmp_path / "out") == local
    assert {cell["tries"] for cell in Store(tmp_path / "out").records()} == {1}
    assert rays() <= before and set(Path("/tmp").glob("kr*")) <= folders


def actor_of(run: subprocess.Popen, working: bool = True) -> psutil.Process:
    """An actor of the run's, once one is busy with a job."""
    until = time.monotonic() + 400
    while time.monotonic() < until:
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(run.pid).children(recursive=True):
                if "ray::Holder.do" in " ".join(process.cmdline()) or "·" in " ".join(process.cmdline()):
                    return process
        if run.poll() is not None:
            break
        time.sleep(0.05)
    pytest.fail(f"no actor had a job: {run.stderr.read() if run.poll() is not None else 'still running'}")


@ray
@needs_ray
@pytest.mark.slow
def test_an_actor_that_is_killed_loses_nothing(sweep, local, tmp_path):
    run = started(*sweep, "--on", "ray", "--actors", "1", "--out", str(tmp_path / "out"))
    actor_of(run).send_signal(signal.SIGKILL)
    _, said = run.communicate(timeout=500)
    assert run.returncode == 0, said
    assert table(tmp_path / "out") == local
    assert sorted({cell["tries"] for cell in Store(tmp_path / "out").records()}) == [1, 2]


@ray
@needs_ray
@pytest.mark.slow
def test_a_head_that_is_killed_ends_the_run_and_the_same_command_resumes(sweep, local, tmp_path):
    words = [*sweep, "--on", "ray", "--actors", "1", "--out", str(tmp_path / "out")]
    before, run = rays(), started(*words)
    actor_of(run)
    for process in psutil.Process(run.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "gcs_server" in process.name():
                process.kill()
    _, said = run.communicate(timeout=120)
    line = said.strip().splitlines()[-1]
    assert run.returncode == 2 and line.startswith("error: ") and "same command resumes" in line
    assert rays() <= before
    run = started(*words)
    _, said = run.communicate(timeout=500)
    assert run.returncode == 0, said
    assert table(tmp_path / "out") == local


@ray
@needs_ray
@pytest.mark.slow
def test_a_node_that_is_killed_loses_nothing(sweep, local, tmp_path):
    """A cluster of two nodes, whose second one is the only one with room for the actor at first."""
    script = Path(__file__).resolve().parents[2] / "deploy" / "demo.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path / "out"), "--", *sweep[1:]], cwd=ROOT,
        env=environment(), text=True, capture_output=True, timeout=580,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert table(tmp_path / "out") == local
    assert max(cell["tries"] for cell in Store(tmp_path / "out").records()) == 2
    assert json.loads((tmp_path / "out" / "summary.json").read_text())
    assert driver.TRIES == 3


# what a study costs, and what starts a cluster


def test_hours_come_from_the_cells_own_seconds(tmp_path, capsys):
    stands = {"config": {}, "machine": machine(threads=1), "versions": {}, "metrics": []}
    store = Store(tmp_path)
    store.prepare()
    for task, prefill in (("a", 3000.0), ("b", 600.0)):
        for method in ("full", "int8"):
            cell = {
                "model": "m",
                "method": method,
                "task": task,
                "seconds": 300.0,
                "prefill_seconds": prefill,
            }
            store.save(cell | stands | {"together": 2})
    store.save({"model": "m", "method": "", "task": "study", "seconds": 1e6} | stands)  # no job of a sweep's
    assert hours.jobs_of(store.summaries()) == {("m", "a"): 3600.0, ("m", "b"): 1200.0}
    assert hours.main([str(tmp_path), "--times", "3"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "12 cells in 6 jobs, the longest 3600 s"
    assert told[-3:] == ["| 1 | 4.00 | 100% |", "| 8 | 1.00 | 50% |", "| 64 | 1.00 | 6% |"]
    assert hours.wall([4, 3, 3, 2, 2], 2) == 8  # 4 + 2 + 2 and 3 + 3
    assert hours.main([str(tmp_path / "nothing")]) == 2


def test_the_manifests_say_what_the_options_are():
    kube = yaml.safe_load((ROOT / "deploy" / "kuberay-job.yaml").read_text())
    words = kube["spec"]["entrypoint"].split()
    assert words[:3] == ["python", "-m", "eval"] and {"--on", "--out"} <= set(words)
    made = yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text())
    assert {"cluster_name", "provider", "setup_commands"} <= set(made)


@needs_ray
def test_the_cluster_file_fits_rays_schema():
    jsonschema = pytest.importorskip("jsonschema")
    spec = importlib.util.find_spec("ray")
    schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(yaml.safe_load((ROOT / "deploy" / "cluster.yaml").read_text()), schema)
