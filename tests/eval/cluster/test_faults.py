"""The same table under every fault: sweeps on clusters of Ray's whose parts are killed, held, or full.

They are marked `ray`: `make test-ray`. What waits here waits long, since a machine may be busy; nothing is
timed.
"""

import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from eval.command import main
from eval.core.comparable import SPEED
from eval.core.results import Store

ROOT = Path(__file__).resolve().parents[3]
LONG = 400.0  # seconds

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make test-ray installs ray"),
]


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", **more}
    return kept | own | {"RAY_agent_register_timeout_ms": "100000", "RAY_memory_monitor_refresh_ms": "0"}


@pytest.fixture(scope="module")
def demo():
    """The module docs/deploy/demo.py."""
    spec = importlib.util.spec_from_file_location("cluster_demo", ROOT / "docs" / "deploy" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sweep(folder):
    """Words of a sweep of six cells in three jobs: agreement, chain, recall."""
    methods = ["full", "sinks:budget=0.5"]
    words = ["accuracy", "--model", str(folder), "--limit", "2", "--methods", *methods]
    return [*words, "--tasks", "recall", "chain", "agreement"]


@pytest.fixture(scope="module")
def local(sweep, tmp_path_factory):
    """The table of that sweep, made by the local pool."""
    out = tmp_path_factory.mktemp("local")
    assert main([*sweep, "--jobs", "1", "--out", str(out)]) == 0
    return table(out)


def table(out: Path) -> list:
    """What must be the same digit by digit."""
    cells = [cell for cell in Store(out).records() if not cell["task"].startswith(SPEED)]
    return [(c["method"], c["task"], c["config"], c["metrics"], c["values"], c["bytes"]) for c in cells]


def tries(out: Path) -> Counter:
    """{tries: cells that took so many}"""
    return Counter(cell["tries"] for cell in Store(out).records())


def started(*words: str, **environs: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "eval", *words], cwd=ROOT, env=environment(**environs), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(run: subprocess.Popen, code: int = 0) -> str:
    """What a run said on stderr."""
    _, said = run.communicate(timeout=LONG)
    assert run.returncode == code, said
    return said


def rays(text: str = "") -> set[int]:
    """Processes of Ray's on this machine whose command line has this text."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if text in line and any(word in line for word in ("raylet", "gcs_server", "ray::", "ray/dashboard")):
            found.add(process.pid)
    return found


def wait_for(run: subprocess.Popen, look):
    """What `look` finds, while the run goes on."""
    until = time.monotonic() + LONG
    while time.monotonic() < until and run.poll() is None:
        if found := look():
            return found
        time.sleep(0.02)
    run.kill()
    pytest.fail(f"nothing was seen: {run.communicate()[1]}")


def test_a_cluster_of_our_own_listens_on_this_machine_alone(sweep, tmp_path):
    run, heard = started(*sweep, "--on", "ray", "--actors", "1", "--out", str(tmp_path)), set()
    while run.poll() is None:
        with contextlib.suppress(psutil.Error):
            command = psutil.Process(run.pid)
            for process in (command, *command.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    for socket_ in process.net_connections("inet"):
                        if socket_.status == psutil.CONN_LISTEN:
                            heard.add(socket_.laddr.ip.removeprefix("::ffff:"))
        time.sleep(0.2)
    ended(run)
    assert heard == {"127.0.0.1"}


# one cluster that all of these share


@dataclass
class Cluster:
    on: str  # for --on
    raylet: psutil.Process
    logs: Path
    token: dict[str, str]  # environment of those who may use it


@pytest.fixture(scope="module")
def cluster():
    """A cluster of one node with two CPUs, as `ray start` makes it where there is a token."""
    with contextlib.ExitStack() as stack:
        for left in (2, 1, 0):  # a busy machine: Ray gives a node 30 s, which nobody can change
            try:
                made = stack.enter_context(head())
                break
            except RuntimeError:
                if not left:
                    raise
        yield made


@contextlib.contextmanager
def head():
    """RuntimeError where it does not come up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = Path(tempfile.mkdtemp(prefix="kt", dir="/tmp"))  # a short name: a socket's path has 107 bytes
    ray, token, told = Path(sys.executable).parent / "ray", place / "token", place / "told"
    token.write_text(secrets.token_hex(32))
    words = f"start --head --block --port {port} --num-cpus 2 --temp-dir {place}"
    words += f" --include-dashboard false --object-store-memory {80 * 2**20}"
    environs = {"RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_MODE": "token"}
    with told.open("w") as file:
        process = subprocess.Popen(
            [str(ray), *words.split()], env=environment(**environs), stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
    try:
        while "Ray runtime started" not in told.read_text():
            if process.poll() is not None:
                raise RuntimeError(told.read_text())
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        raylet = next(child for child in children if child.name() == "raylet")
        yield Cluster(f"ray:127.0.0.1:{port}", raylet, place / "session_latest" / "logs", environs)
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        shutil.rmtree(place, ignore_errors=True)


def starts(cluster) -> Counter:
    """{job: how often it began on this cluster}, by the logs of its processes."""
    lines = (line for log in cluster.logs.glob("worker-*.err") for line in log.read_text().splitlines())
    return Counter(line.removeprefix("begins: ") for line in lines if line.startswith("begins: "))


def at_work(demo, cluster, run) -> tuple[psutil.Process, str]:
    """A process of the cluster's that works on a job, held in it, and the job."""
    return wait_for(run, lambda: demo.held(cluster.raylet.children(recursive=True), cluster.logs))


def test_a_cluster_that_runs_gives_the_local_table(cluster, sweep, local, tmp_path):
    """Accuracy, agreement and speed by one command; speed cells have the node for themselves."""
    before = starts(cluster)
    ended(started("all", *sweep[1:], "--on", cluster.on, "--out", str(tmp_path), **cluster.token))
    speed = [cell for cell in Store(tmp_path).records() if cell["task"].startswith(SPEED)]
    assert table(tmp_path) == local and tries(tmp_path) == {1: 6 + len(speed)}
    assert all(cell["alone"] and cell["node"] and cell["rows"] for cell in speed)
    assert {"full", "sinks:budget=0.5"} < {cell["method"] for cell in speed}  # and transformers' own
    assert sorted((starts(cluster) - before).values()) == [1, 1, 1, 1]
    assert (tmp_path / "report.html").exists()


def test_a_cluster_whose_token_is_not_shown_is_one_line(cluster, sweep, tmp_path):
    line = ended(started(*sweep, "--on", cluster.on, "--out", str(tmp_path)), 2).strip().splitlines()[-1]
    assert line.startswith(f"error: --on {cluster.on}") and line.endswith("export RAY_AUTH_MODE=token")


def test_an_actor_that_is_killed_and_one_whose_scratch_is_full_lose_nothing(
    demo, cluster, sweep, local, tmp_path
):
    """The first job's actor is killed; the next one may write no file longer than nothing, which that job
    needs, where it was held before it made its documents, or the job behind it."""
    before = starts(cluster)
    run = started(*sweep, "--on", cluster.on, "--actors", "1", "--out", str(tmp_path), **cluster.token)
    actor, killed = at_work(demo, cluster, run)
    actor.kill()
    actor, again = at_work(demo, cluster, run)
    assert again == killed
    actor.rlimit(psutil.RLIMIT_FSIZE, (0, 0))
    actor.resume()
    ended(run)
    assert table(tmp_path) == local
    found = {cell["task"]: cell["tries"] for cell in Store(tmp_path).records()}
    itself = found["chain"] == 3
    assert found == {"agreement": 1 if itself else 2, "chain": 3 if itself else 2, "recall": 1}
    logged = 3 if itself else 2  # then its log takes no line any more
    assert sorted((starts(cluster) - before).values()) == [1, 1, logged]


# clusters that are lost, or parts of them


def test_a_head_that_is_killed_ends_the_run_and_the_same_command_resumes(
    demo, cluster, sweep, local, tmp_path
):
    """On clusters of the command's own, which join nobody and leave nothing."""
    words = [*sweep, "--on", "ray", "--actors", "1", "--out", str(tmp_path)]
    before, others, folders = rays(), starts(cluster), set(Path("/tmp").glob("kr*"))
    run = started(*words)

    def at_work():
        processes = psutil.Process(run.pid).children(recursive=True)
        logs = [place for place in Path("/tmp").glob("kr*/session_2*/logs") if rays(str(place.parents[1]))]
        return any(demo.held(processes, place) for place in logs)

    wait_for(run, at_work)
    for process in psutil.Process(run.pid).children(recursive=True):
        if process.name() == "gcs_server":
            process.send_signal(signal.SIGKILL)
    line = ended(run, 2).strip().splitlines()[-1]
    assert line.startswith("error: ") and "same command resumes" in line
    assert rays() <= before and set(Path("/tmp").glob("kr*")) <= folders
    ended(started(*words))
    assert table(tmp_path) == local and tries(tmp_path) == {1: 6}
    assert starts(cluster) == others
    assert rays() <= before and set(Path("/tmp").glob("kr*")) <= folders


def test_a_node_that_is_killed_loses_nothing(sweep, local, tmp_path):
    """`make cluster-demo` in small: a cluster of two nodes, one of which is killed while it works."""
    done = subprocess.run(
        [sys.executable, "docs/deploy/demo.py", "--out", str(tmp_path), "--", *sweep[1:]], cwd=ROOT,
        env=environment(), text=True, capture_output=True, timeout=LONG,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "killed the second node while it worked on " in done.stderr
    assert table(tmp_path) == local and tries(tmp_path) == {1: 4, 2: 2}
