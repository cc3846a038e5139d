"""A sweep on a Ray cluster of two nodes on this machine; one node is killed while a job runs there.

    python deploy/demo.py --out results/cluster-demo -- --limit 4 --tasks recall chain --methods full int8

What follows `--` goes to `python -m eval accuracy`. The second node's raylet is ended with SIGKILL as soon as
Ray shows a process there that works on a job; the sweep goes on on the first one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import psutil
from ray.cluster_utils import Cluster

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ.setdefault("RAY_agent_register_timeout_ms", "100000")  # a busy machine
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # what neighbours take is not ours to give back
STORE = 80 * 2**20  # bytes of a node's object store, Ray's least
WORKING = (" · ", "Holder.do")  # a job's name, or the call that does it, in the list of processes


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def busy(raylet: psutil.Process) -> str | None:
    """The job that a process of this node works on: Ray shows its name in the list of processes."""
    for process in raylet.children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if words.startswith("ray::") and any(word in words for word in WORKING):
            return words.removeprefix("ray::").strip()
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("sweep", nargs="*")
    given = parser.parse_args()
    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        second = cluster.add_node(**node)
        raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
        words = ["accuracy", *given.sweep, "--on", f"ray:{cluster.address}", "--actors", "2"]
        say(f"two nodes are up at {cluster.address}; the sweep begins")
        sweep = subprocess.Popen([sys.executable, "-m", "eval", *words, "--out", given.out])
        while sweep.poll() is None:
            if job := busy(raylet):
                raylet.kill()
                say(f"killed the second node while it worked on {job}")
                break
            time.sleep(0.05)
        else:
            say("the second node never had a job")
            return sweep.returncode or 1
        return sweep.wait()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
