"""A sweep whose model's heads are split among two processes gives the table of one."""

import pytest
from split import torchrun

from eval.command import main
from eval.core.results import Store

METHODS = ("full", "adakv:budget=0.5", "kvzip:budget=0.5")
SWEEP = ["--limit", "2", "--tasks", "recall", "agreement", "--methods", *METHODS]


def test_two_processes_give_the_table_of_one(folder, tmp_path):
    """Only the first one writes and speaks; bytes are those of both."""
    words = ["accuracy", "--model", str(folder), "--dtype", "float32", *SWEEP]
    done = torchrun("-m", "eval", *words, "--tp", "--out", str(tmp_path / "two"))
    assert done.returncode == 1, done.stderr  # kvzip has no room to read these prompts again
    assert main([*words, "--jobs", "0", "--out", str(tmp_path / "one")]) == 1
    one, two = ({(c["method"], c["task"]): c for c in Store(tmp_path / n).records()} for n in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 5
    assert done.stderr.count("failed: kvzip:budget=0.5 on recall: ") == 1
    assert (tmp_path / "two" / "report.html").exists(), done.stderr
    for key, cell in one.items():
        assert done.stderr.count(f"/6 {key[0]} on {key[1]}: ") == 1
        found = two[key]
        assert found["config"] == cell["config"] | {"tp": 2}
        for mine, theirs in zip(found["metrics"], cell["metrics"], strict=True):
            assert mine["value"] == pytest.approx(theirs["value"], abs=1e-4)
        held, whole = found["bytes"]["device_bytes"], cell["bytes"]["device_bytes"]
        assert 0.9 * whole < held < 1.2 * whole  # some are held by both, heads of one length by neither
        assert found["scored"] == pytest.approx(cell["scored"], abs=1e-6)


def test_one_process_is_refused_in_one_line(tmp_path, monkeypatch, refused):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    line = refused("accuracy", "--tp", "--out", str(tmp_path / "out"))
    assert line.startswith("error: tensor parallelism: there is one process; start several: torchrun")
    assert not (tmp_path / "out").exists()
