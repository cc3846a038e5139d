"""What the process of `python -m eval gpu` does, and what is done when it does not."""

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from eval.command import main
from eval.core.errors import Failed
from eval.gpu import plan
from eval.gpu.plan import Gpu
from eval.gpu.unit import FIRST, LAST, NEXT, Unit
from eval.gpu.worker import Worker

ROOT = Path(__file__).parents[3]


def unit_of(name: str, **given) -> Unit:
    return Unit("link", name, FIRST, 1, {"sizes": [4096]} | given)


def test_a_unit_that_fails_hangs_or_kills_its_process_is_followed_by_the_next(monkeypatch):
    """In real processes."""
    worker = Worker(True, lambda line: None)
    try:
        assert worker.about()["device"] == "cpu (dry run)"
        with pytest.raises(Failed, match="not_there"):
            worker.ask(unit_of("wrong", not_there=1), 60)
        first = worker.running.process.pid
        assert worker.ask(unit_of("fine"), 60)["rows"]
        assert worker.running.process.pid == first
        os.kill(first, 9)
        with pytest.raises(Failed, match="ended by itself"):
            worker.ask(unit_of("killed"), 60)
        begun = time.monotonic()
        with pytest.raises(Failed, match="longer than 2 s and was ended"):
            worker.ask(unit_of("endless", sizes=[4096] * 10**6), 2)
        assert time.monotonic() - begun < 120
    finally:
        worker.stop()
    assert not [child for child in multiprocessing.active_children() if "Spawn" in repr(child)]


def test_a_process_that_measures_ends_with_the_one_that_planned():
    """Also when that one is killed while a unit runs: on a GPU its memory would be held."""
    program = (
        "import sys, threading, time\n"
        "from eval.gpu.unit import Unit\n"
        "from eval.gpu.worker import Worker\n"
        "if __name__ == '__main__':\n"
        "    worker = Worker(True, print)\n"
        "    worker.about()\n"
        "    endless = Unit('link', 'endless', 0, 1, {'sizes': [4096] * 10**6})\n"
        "    threading.Thread(target=worker.ask, args=(endless, 600), daemon=True).start()\n"
        "    time.sleep(2)\n"
        "    print(worker.running.process.pid, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "planner.py")
        file.write_text(program)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        planner = subprocess.Popen([sys.executable, file], stdout=subprocess.PIPE, text=True, env=environment)
        worker = int(planner.stdout.readline())
        assert psutil.pid_exists(worker)
        planner.kill()
        planner.wait()
        _, alive = psutil.wait_procs(
            [psutil.Process(worker)] if psutil.pid_exists(worker) else [], timeout=20
        )
    assert not alive


class Scripted:
    """A worker that answers by a list, without a process."""

    def __init__(self, answers: dict, seconds: float = 0.0):
        self.answers, self.asked, self.seconds = answers, [], seconds

    def about(self) -> dict:
        return {"device": "card", "versions": {"triton": None}}

    def ask(self, unit, seconds):
        self.asked.append(unit.name)
        answer = self.answers.get(unit.name, {"rows": [{"ms": 1.0}], "line": "fine", "notes": []})
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def stop(self) -> None:
        pass


def run(monkeypatch, capfd, tmp_path, answers=(), *words: str, units=None):
    """The command with scripted units: (exit code, what was asked, gpu.json, what was said)."""
    worker = Scripted(dict(answers))
    monkeypatch.setattr(plan, "Worker", lambda dry, say: worker)
    if units is not None:
        monkeypatch.setattr(Gpu, "units", lambda self: sorted(units, key=lambda unit: unit.rank))
    code = main(["gpu", "--dry", "--out", str(tmp_path / "out"), *words])
    file = tmp_path / "out" / "gpu.json"
    return (
        code,
        worker.asked,
        json.loads(file.read_text()) if file.is_file() else None,
        capfd.readouterr().err,
    )


PLAN = [
    Unit("right", "nice", LAST, 1), Unit("right", "a", FIRST, 1), Unit("link", "b", FIRST, 1),
    Unit("link", "c", NEXT, 1), Unit("right", "d", NEXT, 1),
]  # fmt: skip


def test_the_best_comes_first_and_a_failure_is_one_line_and_tried_again(monkeypatch, capfd, tmp_path):
    """Everything is written as it comes, and kept; of what fails, the traceback."""
    wrong = {"b": Failed("RuntimeError: CUDA error: an illegal memory access", "Traceback ...\nwhole")}
    code, asked, found, said = run(monkeypatch, capfd, tmp_path, wrong, units=PLAN)
    assert code == 1 and asked == ["a", "b", "c", "d", "nice"]
    assert found["failed"] == [
        {"task": "gpu:link:b", "line": "RuntimeError: CUDA error: an illegal memory access",
         "traceback": "Traceback ...\nwhole"}
    ]  # fmt: skip
    assert list(found["units"]) == ["right:a", "link:c", "right:d", "right:nice"]
    assert found["left_out"] == [] and found["machine"]["device"] == "card" and "1/5 right:a: fine" in said
    assert "failed: link:b: RuntimeError: CUDA error" in said and "whole" not in said
    assert run(monkeypatch, capfd, tmp_path, units=PLAN)[1] == ["b"]
    assert run(monkeypatch, capfd, tmp_path, units=PLAN)[1] == [], "everything is kept"
