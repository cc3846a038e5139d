"""The command line: bad input is one line and exit code 2, Ctrl-C keeps what is finished."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from eval.command import main

ROOT = Path(__file__).resolve().parents[2]


def cells(tmp_path) -> dict[str, float]:
    return {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "cells").glob("*.json")}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "command"),
        (["evaluate"], "invalid choice"),
        (["all", "--limit", "0"], "--limit"),
        (["accuracy", "--engine", "compiled", "--device-map", "auto"], "is in one piece"),
        (["all", "--device", "cuda:99"], "CUDA"),
        (["all", "--methods", "h20"], "h2o"),
        (["all", "--methods", "h2o:budget=1.5"], "budget=1.5"),
        (["accuracy", "--methods", "full,int4", "--budgets", "0,2"], "none of the methods has a budget"),
        (["all", "--limit", "9" * 30], "too large"),
        (["all", "--tasks", "recal"], "did you mean recall"),
        (["report", "--out", "nowhere"], "no results"),
        (["merge", "nowhere", "--out", "there"], "no cells"),
        (["all", "--suite", "attention"], "invalid choice: 'attention'"),
        (["reproduce", "--studies", "passges"], "expected one of passages"),
        (["accuracy", "--model", "X", "--model_args", "pretrained=Y"], "name one of them"),
        (["accuracy", "--model_args", "dtype=auto"], "dtype=auto"),
        (["accuracy", "--samples", "nowhere.json"], "numbers of documents"),
        (["accuracy", "--samples", '{"recall": [-1]}'], "numbers of documents"),
        (["accuracy", "--samples", '{"cloze": [1]}', "--tasks", "recall"], "not among --tasks"),
        (["accuracy", "--samples", '{"agreement": [1]}', "--tasks", "agreement"], "not among --tasks that"),
        (
            ["accuracy", "--num-fewshot", "2", "--tasks", "recall", "agreement"],
            "none of the tasks takes shots",
        ),
        (["accuracy", "--samples", '{"chain": [1]}', "--tasks", "chain", "--limit", "2"], "name one of them"),
        (["accuracy", "--shard", "3/2"], "expected I/N"),
        (["accuracy", "--shard", "1"], "expected I/N"),
        (["accuracy", "--shard", "9/9", "--tasks", "recall", "--methods", "full"], "nothing in it"),
        (["accuracy", "--device", "cpu,cpu", "--jobs", "2"], "one process on each"),
        (["accuracy", "--device", "cpu,meta"], "one kind"),
        (["accuracy", "--device", "cpu,"], "expected cpu"),
        (["accuracy", "--on", "slurm"], "expected ray, or ray:HOST:PORT"),
        (["accuracy", "--on", "ray:"], "expected ray, or ray:HOST:PORT"),
        (["accuracy", "--actors", "2"], "--actors: needs --on ray"),
        (["accuracy", "--gpus-per-actor", "-1"], "not a number of at least 0"),
        (["accuracy", "--cpus-per-actor", "nan"], "not a number of at least 0"),
        (["perplexity", "--text", "no.txt"], "--text no.txt: there is no such file"),
        (["perplexity", "--chunk", "64", "--prompt", "64"], "expected 2 to 63"),
    ],
)
def test_bad_input_is_one_line(refused, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert said in refused(*words)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("")
    line = refused("all", "--out", str(tmp_path / "file" / "out"))
    assert "cannot be written" in line


def test_models_that_cannot_be_used(refused, tmp_path, folder):
    from safetensors.torch import load_file, save_file

    bare, broken = tmp_path / "bare", tmp_path / "broken"
    for copy in (bare, broken):
        shutil.copytree(folder, copy)
    for file in bare.glob("token*"):
        file.unlink()
    weights = load_file(broken / "model.safetensors")
    name = next(iter(weights))
    weights[name][0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    quick = ["--limit", "1", "--jobs", "0", "--tasks", "recall", "--out", str(tmp_path / "out")]
    assert "tokenizer" in refused("all", "--model", str(bare), *quick)
    assert "NaN" in refused("all", "--model", str(broken), *quick)
    assert "group" in refused("all", "--model", str(folder), "--methods", "int4:group=3", *quick)
    missing = str(tmp_path / "missing")
    assert "missing" in refused("speed", "--model", missing, "--jobs", "0", "--out", missing + "-out")


def test_a_built_in_task_without_its_data_is_one_line(refused, tmp_path, folder):
    words = ["--model", str(folder), "--tasks", "piqa", "--out", str(tmp_path / "out")]
    assert "could not be fetched" in refused("accuracy", *words)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--protocol", ("question-inside", "context-first")),
        ("--budgets", ("0.5", "0.25")),
    ],
)
def test_two_settings_are_beside_each_other_in_one_folder(
    folder, tmp_path, option, values, capsys, no_pictures
):
    """Nothing finished is made again or replaced, in whatever order they are asked for."""
    base = ["accuracy", "--model", str(folder), "--limit", "2", "--jobs", "0", "--tasks", "recall"]
    base += ["--out", str(tmp_path / "out"), "--methods", "full", "sinks:sinks=1"]
    seen = {}
    for value in (*values, *values, ",".join(values)):
        assert main([*base, *([] if option == "--budgets" else ["--budgets", "0.5"]), option, value]) == 0
        now = cells(tmp_path)
        assert now | seen == now
        seen = now
    assert len(seen) == (3 if option == "--budgets" else 4)  # full has no budget
    assert capsys.readouterr().err.count("everything is there") == (3 if option == "--budgets" else 4)


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGKILL, -signal.SIGKILL, ""),
    ],
)
def test_a_signal_in_a_real_run(folder, tmp_path, number, code, said):
    """Worker processes, a real signal after the first task: one line, the cells are there, nobody lives on.

    Ctrl-C reaches workers too; SIGTERM and SIGKILL, the parent alone.
    """
    out = tmp_path / "out"
    command = [sys.executable, "-m", "eval", "accuracy", "--model", str(folder), "--out", str(out)]
    tasks = ["recall", "needle", "chain", "recall_em", "needle_em", "chain_em"]
    command += ["--jobs", "1", "--methods", "full", "--tasks", *tasks, "--batch-size", "1", "--limit", "6"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run with `&`
    )
    deadline = time.monotonic() + 600
    while process.poll() is None and time.monotonic() < deadline:
        if any((out / "cells").glob("[!.]*.json")):
            break
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2  # the fork server, a worker
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == code, printed
    assert not psutil.wait_procs(workers, timeout=30)[1]
    assert "Traceback" not in printed
    kept = len(list((out / "cells").glob("[!.]*.json")))
    assert 1 <= kept < len(tasks)
    assert all(json.loads(path.read_text()) for path in (out / "cells").glob("[!.]*.json"))
    if said:
        assert printed.splitlines()[-1].startswith(f"{said}: {kept} finished cells are kept in {out};")
