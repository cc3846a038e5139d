"""However a run ends and wherever it stands, one line says it: full disks, gone readers, no home."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kvlab
from eval.command import main
from eval.core.results import Store
from eval.speed import models
from kvlab import scratch

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = "/proc/no/home"  # a folder that nobody can make, root included


def python(*words: str, cwd: Path, program=sys.executable, **environment) -> subprocess.CompletedProcess:
    inherited = {
        key: value for key, value in os.environ.items() if key not in ("XDG_CACHE_HOME", "KVLAB_CACHE")
    }
    inherited |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"} | environment
    return subprocess.run(
        [program, *words], cwd=cwd, env=inherited, text=True, capture_output=True, timeout=600
    )


# a finished run, started again


def test_a_finished_run_says_so_and_shows_its_tables(folder, tmp_path, capsys, monkeypatch):
    from eval.speed import speed

    monkeypatch.setitem(speed.CONTEXTS, "model", (32, 1024))
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "baselines", lambda llama: ["hf-dynamic"])
    words = ["all", "--tasks", "recall", "--methods", "full", "int8", "--jobs", "0"]
    words += ["--model", str(folder), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    first = capsys.readouterr()
    monkeypatch.setattr(Store, "save", lambda *_: pytest.fail("a cell was made again"))
    monkeypatch.setattr("eval.core.workers.Here.finish", lambda *_: pytest.fail("a model was loaded"))
    assert main(words) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    for kind in ("accuracy", "speed"):
        (line,) = (line for line in again.err.splitlines() if f" {kind} cells are kept" in line)
        kept, _, total, *_ = line.split()
        assert kept == total and line.endswith("everything is there")
    assert "speed at 1024 tokens is left out" in again.err  # the tiny model takes 512


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


@pytest.mark.parametrize("name", ["summary.json", "accuracy.parquet"])
def test_a_folder_in_the_place_of_a_file(quick, tmp_path, capsys, name):
    (tmp_path / "out" / name).mkdir(parents=True)
    line = refused(capsys, ["accuracy", *quick, "0"])
    assert line == f"error: {tmp_path / 'out' / name}: Is a directory"


@pytest.mark.parametrize(
    "words",
    [["-c", "from eval.start import kvlab; kvlab()"], ["-m", "eval", "report"], ["-m", "kvlab", "ask"]],
)
def test_ctrl_c_while_packages_are_imported_is_no_traceback(tmp_path, words):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    done = python(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (130, "interrupted: nothing was begun\n")


def test_ctrl_c_ends_the_fork_server_while_it_imports(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import eval.core.preload"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("where", ["a finalizer", "a callback", "the end"])
def test_ctrl_c_where_python_passes_over_it(tmp_path, where):
    """It comes again a moment later; behind the last line of a command it changes nothing."""
    body = {
        "a finalizer": "class A:\n  def __del__(self): kill()\nA()",
        "a callback": "import ctypes\nctypes.CFUNCTYPE(None)(kill)()",
        "the end": "import atexit\natexit.register(kill)",
    }[where]
    (tmp_path / "a_command.py").write_text(
        "import os, signal, time\ndef kill(): os.kill(os.getpid(), signal.SIGINT); time.sleep(0.01)\n"
        f"def main():\n try:\n  exec({body!r}, globals())\n"
        f"  for _ in range({0 if where == 'the end' else 90}): time.sleep(0.1)\n"
        "  return 0\n except KeyboardInterrupt:\n  return 130\n"
    )
    code = "import sys; from eval.start import run; sys.exit(run('a_command'))"
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (0 if where == "the end" else 130, "")


def test_a_full_disk_under_standard_output():
    code = "import sys; from kvlab.cli import main; sys.exit(main(['methods']))"
    shell = f'{sys.executable} -c "{code}" > /dev/full'
    done = subprocess.run(["sh", "-c", shell], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2
    assert done.stderr == "kvlab: error: standard output: No space left on device\n"


# other people's files


def test_a_terminal_of_unknown_width_has_tables():
    """Which some programs that run others say: COLUMNS=0."""
    said = python("-m", "kvlab", "methods", cwd=ROOT, COLUMNS="0")
    assert said.returncode == 0 and "snapkv" in said.stdout


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


@pytest.mark.parametrize("said", [{"HOME": NOWHERE}, {"HOME": "", "XDG_CACHE_HOME": NOWHERE}, None])
def test_all_caches_find_a_place_where_nothing_can_be_written(tmp_path, said):
    """The skew's folder, matplotlib's and numba's, beside code that cannot be written either. numba itself
    says nothing of a folder that it is given and cannot write to, and looks for another one."""
    (tmp_path / "compiled.py").write_text(COMPILED)
    (tmp_path / "__pycache__").write_text("a file in the place of the folder")
    code = SETTLED.format(nowhere=NOWHERE, here=str(tmp_path))
    more = said or {"HOME": str(tmp_path), "NUMBA_CACHE_DIR": NOWHERE}
    done = python("-c", code, cwd=tmp_path, TMPDIR=str(tmp_path), **more)
    (place,) = tmp_path.glob("kvlab-*")
    skew, matplotlib, numba = done.stdout.splitlines()
    assert numba == str(place / "numba") and list((place / "numba").rglob("compiled.twice*.nbi"))
    (line,) = done.stderr.splitlines()
    if said:
        assert (skew, matplotlib) == (str(place / "skew"), str(place / "matplotlib"))
        assert line.endswith(f"caches go to {place}") and place.stat().st_mode & 0o077 == 0
    else:
        assert line == f"kvlab: {NOWHERE} cannot be written; caches go to {numba}"


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
