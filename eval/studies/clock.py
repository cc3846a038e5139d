"""Seconds by the clock of the command that people try first, each time in an empty folder."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..core.machine import commit, machine, versions

COMMAND = "python -m eval accuracy --limit 4"


def timed(command: str = COMMAND) -> dict[str, float]:
    """Seconds of a run of `command`, and of its processor time, workers included (0 where the system does not
    say). subprocess.CalledProcessError for a run that fails."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = os.times(), time.perf_counter()
        subprocess.run(
            [sys.executable, *command.split()[1:], "--out", folder], check=True, stdout=subprocess.DEVNULL
        )
        seconds, after = time.perf_counter() - start, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return {"seconds": seconds, "cpu_seconds": spent}


def sentence(made: dict) -> str:
    """What a page says of the runs that are stored."""
    seconds, about = [run["seconds"] for run in made["runs"]], made["machine"]
    return (
        f"`{made['command']}` on the workshop model ends in {min(seconds):.1f} to {max(seconds):.1f} s"
        f" by the clock ({len(seconds)} runs; {about['cpu']}, {about['cores']} cores;"
        " `docs/results/clock.json`)."
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.studies.clock", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/clock.json"))
    chosen = parser.parse_args()
    made = {"command": COMMAND, "machine": machine(), "versions": versions(), "commit": commit()}
    made["load_before"] = os.getloadavg()[0] if hasattr(os, "getloadavg") else None  # how quiet it was
    made["runs"] = [timed() for _ in range(chosen.runs)]
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(sentence(made))


if __name__ == "__main__":
    main()
