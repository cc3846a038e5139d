"""The seconds of a command: run in a folder of its own, told as they are stored."""

import json
import subprocess
from pathlib import Path

import pytest

from eval.studies import clock

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "docs" / "results" / "clock.json"


def test_a_command_is_timed_in_an_empty_folder(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(
        "import os, sys, time\nassert sys.argv[1] == '--out' and not os.listdir(sys.argv[2])\ntime.sleep(0.2)"
    )
    run = clock.timed(f"python {script}")
    assert 0.2 < run["seconds"] < 30 and 0 <= run["cpu_seconds"] < run["seconds"]
    script.write_text("raise SystemExit(1)")
    with pytest.raises(subprocess.CalledProcessError):
        clock.timed(f"python {script}")


def test_the_sentence_says_the_quickest_and_the_slowest_run_and_the_machine():
    made = {"command": "python -m x", "machine": {"cpu": "A CPU", "cores": 2}}
    made["runs"] = [{"seconds": seconds} for seconds in (18.04, 17.6, 19.2)]
    assert "`python -m x`" in clock.sentence(made) and "17.6 to 19.2 s" in clock.sentence(made)
    assert "3 runs; A CPU, 2 cores" in clock.sentence(made)


@pytest.mark.skipif(not STORED.exists(), reason="not measured yet: python -m eval.studies.clock")
def test_the_page_says_what_is_stored():
    made = json.loads(STORED.read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "protocols.md").read_text(encoding="utf-8")
    assert made["command"] == clock.COMMAND and clock.sentence(made) in " ".join(page.split())
