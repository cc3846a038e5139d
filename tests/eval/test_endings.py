"""However a run ends and wherever it stands, one line says it: full disks, gone readers, no home."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import kvlab
from eval.__main__ import main, working_directory_last
from eval.core import show as showing
from eval.core.measurement import Cell, Measurement, option, run
from eval.core.results import Store
from eval.core.show import Show
from eval.report import studies as shown
from eval.speed import models
from eval.studies import kernels, quant, static_graph
from eval.studies.offload import simulated
from eval.studies.offload.published import row
from kvlab import scratch

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "/proc/no/home"  # a folder that nobody can make, root included


@pytest.fixture
def quick(folder, tmp_path):
    """Words of a run of two cells; results in tmp_path/out."""
    words = ["--model", str(folder), "--limit", "1", "--out", str(tmp_path / "out"), "--tasks", "recall"]
    return [*words, "--methods", "full", "sinks:budget=0.5", "--jobs"]


def python(*words: str, cwd: Path, program=sys.executable, **environment) -> subprocess.CompletedProcess:
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "KVLAB_CACHE")
    }
    inherited |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run(
        [program, *words], cwd=cwd, env=inherited, text=True, capture_output=True, timeout=600
    )


# a finished run, started again


@pytest.fixture
def small(monkeypatch):
    """Studies whose experiments are made in no time, and one context for speed."""
    from eval.speed import speed

    monkeypatch.setitem(speed.CONTEXTS, "model", (32, 1024))
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "baselines", lambda: ["hf-dynamic"])
    kernel = {"shape": "8 heads of 32", "tokens": 2048, "kernel": "k", "bits": 8.0, "bytes": 8}
    kernel |= {"ms": 1.0, "ms_low": 1.0, "ms_high": 1.0}
    kernel |= {"fraction_of_bandwidth": 0.5, "speedup": 2.0, "bandwidth_gbps": 9.0}
    monkeypatch.setattr(kernels, "measure", lambda tokens, repeats: [kernel])
    bits = {"experiment": "bits", "method": "full", "unit": "", "tokens": 8}
    values = {"accuracy": 90.0, "perplexity": 20.0, "bits per value": 32.0}
    rows = [bits | {"metric": metric, "value": value} for metric, value in values.items()]
    monkeypatch.setitem(quant.EXPERIMENTS, "bits", lambda study: {"rows": rows})
    monkeypatch.setitem(static_graph.EXPERIMENTS, "prompt", lambda study: {"rows": {"chunks of 1": 2.0}})
    made = [row("latency", system, 1.0, "ms", "simulated", 2048) for system in ("full", "infinigen")]
    monkeypatch.setitem(simulated.EXPERIMENTS, "latency", lambda study: {"rows": made})
    monkeypatch.setattr(shown, "latency", lambda rows: Figure())


@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        (["all", "--tasks", "recall", "--methods", "full", "int8", "--jobs", "0"], ("accuracy", "speed")),
        (["accuracy", "--tasks", "recall", "--methods", "full", "--jobs", "0"], ("accuracy",)),
        (["speed", "--methods", "full", "--jobs", "0"], ("speed",)),
        (["attention"], ("attention",)),
        (["quant", "--experiments", "bits"], ("quant",)),
        (["offload", "--experiments", "latency"], ("offload",)),
        (["static-graph", "--experiments", "prompt"], ("static-graph",)),
    ],
)
def test_a_finished_run_says_so_and_shows_its_tables(
    small, folder, tmp_path, capsys, monkeypatch, words, kinds
):
    model = [] if words[0] in ("attention", "static-graph") else ["--model", str(folder)]
    words = [*words, *model, "--out", str(tmp_path / "out")]
    assert main(words) == 0
    first = capsys.readouterr()
    monkeypatch.setattr(Store, "save", lambda *_: pytest.fail("a cell was made again"))
    monkeypatch.setattr("eval.core.workers.Here.finish", lambda *_: pytest.fail("a model was loaded"))
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    for kind in kinds:
        (line,) = (line for line in again.err.splitlines() if f" {kind} cells are kept" in line)
        kept, _, total, *_ = line.split()
        assert kept == total and line.endswith("everything is there")
    if "speed" in kinds:
        assert "speed at 1024 tokens is left out" in again.err  # the tiny model takes 512


def test_a_folder_without_tables_is_refused(small, tmp_path, capsys):
    assert main(["static-graph", "--experiments", "prompt", "--out", str(tmp_path)]) == 0
    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "no cells of accuracy or speed" in capsys.readouterr().err


def test_a_study_says_what_was_made_otherwise(small, tmp_path, capsys):
    words = ["static-graph", "--out", str(tmp_path), "--experiments", "prompt"]
    assert main([*words, "--threads", "2"]) == 0
    assert "left out" not in capsys.readouterr().err
    static_graph.EXPERIMENTS["memory"] = lambda study: {"rows": {}}
    assert main([*words[:-1], "memory"]) == 0
    assert "left out, made under other settings: prompt (threads 2, not 1)" in capsys.readouterr().err


# lines where there is no terminal


class Slow(Measurement):
    """Three cells; the second takes long."""

    name, about = "slow", ""
    pause: float = option("", 0.0)

    def cells(self):
        return [Cell("m", "", f"part {i}", {}) for i in range(3)]

    def make(self, cell):
        time.sleep(0.5 if cell.task == "part 1" else 0)
        return {"rows": [1, 2]}


def test_a_line_for_every_cell_and_no_long_silence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(showing, "SILENT", 0.2)
    store = Store(tmp_path)
    store.prepare()
    assert run(Slow(out=tmp_path), store, Show(tmp_path)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1/3 part 0: 2 rows" or lines[0].startswith("1/3 part 0: 2 rows, about ")
    assert lines[1].startswith("1/3 slow, at part 1, about ")
    assert [line.split(":")[0] for line in lines if "rows" in line] == [
        f"{i + 1}/3 part {i}" for i in range(3)
    ]
    assert lines[-1] == "3/3 part 2: 2 rows"


def test_what_comes_before_the_first_cell_is_said(monkeypatch, capsys):
    """Options and documents are looked at, a model is loaded: a line says so."""
    monkeypatch.setattr(showing, "PATIENT", 0.02)
    show = Show(Path("nowhere"))
    with show.waiting("reading documents"):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (said := capsys.readouterr().err):
            time.sleep(0.02)
    assert said.startswith("reading documents, ")
    monkeypatch.setattr(showing.threading.Thread, "start", lambda self: None)
    bar = showing.Told("accuracy", 4, 4, print)
    bar.doing("loading smollm2")
    assert bar.place == "loading smollm2" and bar.since
    bar.at("recall", 1)
    assert bar.place == "at recall" and not bar.since
    bar.doing("recall: 3 of 9 requests")
    assert bar.place == "recall: 3 of 9 requests"


def test_time_left_is_said_in_seconds_or_minutes(monkeypatch):
    monkeypatch.setattr(showing.threading.Thread, "start", lambda self: None)
    bar = showing.Told("accuracy", 48, 48, print)
    now = bar.started
    monkeypatch.setattr(showing.time, "monotonic", lambda: now)
    assert bar.left() == ""
    bar.at("recall", 12)
    now += 40
    assert bar.left() == ", about 2 min left"
    bar.at("recall", 40)
    assert bar.left() == ", about 11 s left"  # 28 since the last word, 40 seconds ago, 8 to go
    bar.at("recall", 48)
    assert bar.left() == ""


def test_time_left_settles_where_the_work_is_known(monkeypatch):
    """Three tasks that take 7, 2 and 1 minutes: what is said falls by a minute in each."""
    monkeypatch.setattr(showing.threading.Thread, "start", lambda self: None)
    bar = showing.Told("accuracy", 3, 10.0, print)
    now = bar.started
    monkeypatch.setattr(showing.time, "monotonic", lambda: now)
    said = []
    for task, work in (("prose", 7), ("needle", 2), ("recall", 1)):
        for minute in range(1, work + 1):
            now += 60
            bar.at(task, minute)
            said.append(bar.left())
    assert said[:8] == [f", about {left} min left" for left in range(9, 1, -1)]


def test_slow_cells_after_quick_ones_are_not_promised_at_the_speed_of_the_quick(monkeypatch):
    monkeypatch.setattr(showing.threading.Thread, "start", lambda self: None)
    bar = showing.Told("accuracy", 8, 8, print)
    now = bar.started
    monkeypatch.setattr(showing.time, "monotonic", lambda: now)
    now += 60
    bar.at("recall", 4)
    for minute in range(1, 10):
        now += 60
        bar.at("niah_single_1", minute / 5)  # 20 minutes in all
    assert bar.left() == ", about 11 min left"  # 60 s a cell over all would have been 4


# files that cannot be written, readers that are gone


def refused(capsys, words: list[str]) -> str:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return [line for line in printed.splitlines() if line.startswith("error: ")][-1]


def test_a_full_disk_is_one_line_and_what_is_finished_stays(quick, tmp_path, monkeypatch, capsys):
    true_sync, calls = os.fsync, []

    def sync(handle) -> None:
        calls.append(handle)
        if len(calls) == 5:  # run.json, the first cell with its samples, the second's samples, then
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        true_sync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    line = refused(capsys, ["accuracy", *quick, "0"])
    assert line.startswith(f"error: {tmp_path / 'out' / 'cells'}{os.sep}sinks")
    assert line.endswith(".json: No space left on device")
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 1  # no temporary file is left
    monkeypatch.undo()
    assert main(["accuracy", *quick, "0"]) == 0
    assert "1 of 2 accuracy cells are kept" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["summary.json", "report.html", "accuracy.csv", "accuracy.parquet"])
def test_a_folder_in_the_place_of_a_file(quick, tmp_path, capsys, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    line = refused(capsys, ["accuracy", *quick, "0"])
    assert line == f"error: {tmp_path / 'out' / name}: Is a directory"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EMFILE, errno.EIO])
def test_every_error_of_the_system_is_one_line(quick, tmp_path, monkeypatch, capsys, number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("eval.core.files.tempfile.mkstemp", fail)
    line = refused(capsys, ["accuracy", *quick, "0"])
    assert line == f"error: {tmp_path / 'out' / 'run.json'}: {os.strerror(number)}"


class Gone:
    """A stream whose reader has left."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    flush = close = lambda self: self.write("")
    isatty = lambda self: False


def test_a_run_goes_on_when_nobody_reads(quick, tmp_path):
    """Neither its lines nor its tables: all cells are made, and the report."""
    store = Store(tmp_path)
    store.prepare()
    with contextlib.redirect_stderr(Gone()):
        assert run(Slow(out=tmp_path), store, Show(tmp_path)) == 0
    assert len(list(store.records())) == 3
    assert main(["accuracy", *quick, "0"]) == 0
    page = tmp_path / "out" / "report.html"
    page.unlink()
    with contextlib.redirect_stdout(Gone()):
        assert main(["accuracy", *quick, "0"]) == 0
    assert page.exists()


def test_a_full_disk_under_standard_output():
    code = "import sys; from kvlab.cli import main; sys.exit(main(['methods']))"
    shell = f'{sys.executable} -c "{code}" > /dev/full'
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == "kvlab: error: standard output: No space left on device\n"


# other people's files


def test_names_that_are_markup_elsewhere(quick, tmp_path, capsys, monkeypatch):
    """Square brackets, colons and dollars in names of methods, models and folders are letters."""
    from eval.core.machine import machine, versions

    out = tmp_path / "[red]out[/red] :smile: $x$"
    store = Store(out)
    store.prepare()
    where = {"machine": machine(threads=1), "versions": versions(), "seconds": 1.0}
    held = {"device_bytes": 8.0, "host_bytes": 0.0, "moved_bytes": 0.0, "row_steps": 1}
    for method in ("full", "my[/bold].Keep:a=$\\x$", "my[x].Keep:smile:"):
        metric = {"metric": "acc", "value": 0.5, "stderr": 0.1, "n": 4, "higher_is_better": True}
        cell = {"model": "[bold]m[/]", "method": method, "task": "[i]task[/i]", "config": {}, **where}
        store.save(cell | {"metrics": [metric], "values": {"acc": [1.0, 0.0]}, "bytes": held})
    assert main(["report", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    for name in ("my[/bold].Keep:a=$\\x$", "my[x].Keep:smile:", "[bold]m[/]", "[i]task[/i]", str(out)):
        assert name in printed
    Show(out).line("[red]as it is[/nothing] :smile:")
    assert capsys.readouterr().err == "[red]as it is[/nothing] :smile:\n"


def test_the_working_directory_is_looked_at_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/a", "", "/b"])
    working_directory_last()
    assert sys.path == ["/a", "/b", str(tmp_path)]
    monkeypatch.setattr(sys, "path", ["/a", "/b"])  # of a command that is installed
    working_directory_last()
    assert sys.path == ["/a", "/b", str(tmp_path)]


def test_no_home_and_a_working_directory_full_of_our_names(quick, tmp_path):
    """A real run with a worker: folders named kvlab, course and eval, and nowhere to write caches."""
    here = tmp_path / "here"
    for name in ("kvlab", "course", "eval"):
        (here / name).mkdir(parents=True)
        (here / "lm_eval.py").write_text("raise SystemExit('the wrong lm_eval')")
        if name != "eval":
            (here / name / "__init__.py").write_text(f"raise SystemExit('the wrong {name}')")
    short = Path(tempfile.mkdtemp(prefix="k", dir="/tmp"))  # the path of a socket has 107 bytes
    kvlab = Path(sys.executable).with_name("kvlab")
    done = python("eval", "accuracy", *quick, "1", program=kvlab, cwd=here, HOME=NOWHERE, TMPDIR=str(short))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    (place,) = short.glob("kvlab-*")
    assert lines[0] == f"kvlab: {NOWHERE}/.cache cannot be written; caches go to {place}"
    ended = [
        line.split(" on ")[0] for line in lines[1:] if not line.startswith("0/2")
    ]  # a slow machine waits
    assert ended == ["1/2 full", "2/2 sinks:budget=0.5"]
    assert "report:" in done.stdout
    assert {path.name for path in here.iterdir()} == {"kvlab", "course", "eval", "lm_eval.py"}
    shutil.rmtree(short)


SETTLED = """
import os, sys
from pathlib import Path
from kvlab import scratch
scratch.KERNELS = Path({nowhere!r})
scratch.set_up()
print(scratch.folder("skew"))
import matplotlib
print(matplotlib.get_cachedir())
sys.path.insert(0, {here!r})
import compiled
compiled.twice(2)
print(os.environ["NUMBA_CACHE_DIR"])
"""
COMPILED = "from numba import njit\n@njit(cache=True)\ndef twice(x):\n    return 2 * x\n"


@pytest.mark.parametrize("home", [NOWHERE, None])
def test_all_caches_find_a_place_where_nothing_can_be_written(tmp_path, home):
    """The skew's folder, matplotlib's and numba's, beside code that cannot be written either."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    (tmp_path / "__pycache__").write_text("a file in the place of the folder")
    code = SETTLED.format(nowhere=NOWHERE, here=str(tmp_path))
    more = {"HOME": home} if home else {"HOME": "", "XDG_CACHE_HOME": NOWHERE}
    done = python("-c", code, cwd=tmp_path, TMPDIR=str(tmp_path), **more)
    (place,) = tmp_path.glob("kvlab-*")
    assert done.stdout.splitlines() == [str(place / "skew"), str(place / "matplotlib"), str(place / "numba")]
    assert len(done.stderr.splitlines()) == 1 and f"caches go to {place}" in done.stderr
    assert list(place.rglob("compiled.twice*.nbi"))
    assert place.stat().st_mode & 0o077 == 0


def test_a_folder_that_numba_cannot_write_to_is_told(tmp_path):
    """numba itself says nothing and looks for another one, in the end the working directory."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    (tmp_path / "__pycache__").write_text("a file in the place of the folder")
    code = SETTLED.format(nowhere=NOWHERE, here=str(tmp_path))
    done = python("-c", code, cwd=tmp_path, TMPDIR=str(tmp_path), HOME=str(tmp_path), NUMBA_CACHE_DIR=NOWHERE)
    (place,) = tmp_path.glob("kvlab-*/numba")
    assert done.stdout.splitlines()[-1] == str(place) and [*place.rglob("compiled.twice*.nbi")]
    assert done.stderr == f"kvlab: {NOWHERE} cannot be written; caches go to {place}\n"


def test_somebody_elses_temporary_folder_is_not_used(tmp_path, monkeypatch):
    """One that others can enter, or a link to elsewhere, could hold code of theirs."""
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(scratch.tempfile, "mkdtemp", lambda prefix: str(tmp_path / f"{prefix}own"))
    mine = scratch.temporary()
    assert mine == scratch.temporary() and mine.name == f"kvlab-{os.getuid()}"
    mine.chmod(0o777)
    assert scratch.temporary().name == "kvlab-own"
    mine.rmdir()
    (tmp_path / "theirs").mkdir(mode=0o700)
    mine.symlink_to(tmp_path / "theirs")
    assert scratch.temporary().name == "kvlab-own"


def test_code_that_comes_with_a_model_is_not_run(folder, tmp_path):
    """Nothing is asked, nothing imported: one line."""
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    config = json.loads((copy / "config.json").read_text()) | {"model_type": "theirs"}
    config["auto_map"] = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.C"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="could be loaded"):
        kvlab.load(str(copy))
    with pytest.raises(ValueError, match="trust_remote_code"):
        models.load({"suite": "model", "model": str(copy), "device": "cpu"}, "sdpa")
    assert not (tmp_path / "ran").exists()
