"""A sweep on a Ray cluster of two nodes on this machine; one node is killed while a job runs there.

    python docs/deploy/demo.py --out results/cluster-demo -- --limit 4 --tasks recall --methods full int8

What follows `--` goes to `python -m eval accuracy`. The first node's only CPU is taken until the second one
is dead, so the first job begins on the second one. As soon as the log of a process there says that a job has
begun, the process is held (SIGSTOP), so that the job cannot end any more; then the node's raylet and that
process are killed (SIGKILL), the first node is free, and the sweep goes on there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
import ray
from ray.cluster_utils import Cluster

STORE = 80 * 2**20  # bytes of a node's object store, Ray's least


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Guest:
    """Takes a CPU."""

    def process(self) -> int:
        return os.getpid()


def begun(log: Path) -> str | None:
    """The job that has begun by this log of a process (`eval.cluster.actor`), and not ended."""
    lines = [line.partition(": ") for line in log.read_text(errors="replace").splitlines()]
    what, _, job = next((line for line in reversed(lines) if line[0] in ("begins", "ends")), ("", "", ""))
    return job if what == "begins" else None


def held(processes: Iterable[psutil.Process], logs: Path) -> tuple[psutil.Process, str] | None:
    """One of these processes that works on a job, and the job; the process is stopped, so the job runs until
    somebody lets it go on. None where no process works."""
    for process in processes:
        for log in logs.glob(f"worker-*-{process.pid}.err"):
            try:
                if begun(log) is None:
                    continue
                process.suspend()
                while process.status() != psutil.STATUS_STOPPED:
                    time.sleep(0.01)
                if job := begun(log):
                    return process, job
                process.resume()
            except psutil.NoSuchProcess:
                continue
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("sweep", nargs="*")
    given = parser.parse_args()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_agent_register_timeout_ms", "100000")  # a busy machine
    os.environ.setdefault(
        "RAY_memory_monitor_refresh_ms", "0"
    )  # what neighbours take is not ours to give back
    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        ray.init(address=cluster.address, namespace="demo", log_to_driver=False, logging_level="error")
        guest = ray.remote(Guest).options(num_cpus=1, name="guest", lifetime="detached").remote()
        guest = psutil.Process(ray.get(guest.process.remote()))
        ray.shutdown()  # or Ray tells here at length what we do to it
        second = cluster.add_node(**node)
        logs = Path(second.get_logs_dir_path())
        raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
        words = ["accuracy", *given.sweep, "--on", f"ray:{cluster.address}", "--actors", "2"]
        say(f"two nodes are up at {cluster.address}; the sweep begins")
        sweep = subprocess.Popen([sys.executable, "-m", "eval", *words, "--out", given.out])
        while (found := held(raylet.children(recursive=True), logs)) is None:
            if sweep.poll() is not None:
                say("the second node never had a job")
                return sweep.returncode or 1
            time.sleep(0.02)
        process, job = found
        raylet.kill()
        process.kill()
        say(f"killed the second node while it worked on {job}")
        guest.kill()
        return sweep.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
