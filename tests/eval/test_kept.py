"""A run that is killed keeps every finished batch, and what goes on from there gives the same cells."""

import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from eval.accuracy import agreement, batching, kept
from eval.command import main

TIMES = ("made", "seconds", "prefill_seconds", "sum")


@pytest.fixture
def words(folder, monkeypatch, no_pictures):
    """Words of a run of several batches a task, all methods together."""
    monkeypatch.setattr(batching, "TOKENS_LONG", 600)
    monkeypatch.setattr(agreement, "TOKENS_LONG", 600)
    found = ["accuracy", "--model", str(folder), "--limit", "5", "--jobs", "0", "--batch-size", "2"]
    return [*found, "--methods", "full", "h2o:budget=0.3", "recompute", "--tasks"]


def cells(out) -> dict[str, dict]:
    """Everything that the cells and the samples say but times."""
    found = {path.name: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}
    told = {name: {key: one for key, one in cell.items() if key not in TIMES} for name, cell in found.items()}
    return told | {path.name: path.read_text() for path in (out / "samples").glob("*.jsonl")}


class Killed(KeyboardInterrupt):
    """In the place of SIGKILL."""


def killed_after(monkeypatch, batches: int) -> list:
    """The run ends in the batch behind so many; the keys of all that were computed."""
    true, computed = kept.Kept.batch, []

    def batch(self, work, name, members, compute):
        def counted():
            if len(computed) == batches:
                raise Killed
            computed.append((name, *members))
            return compute()

        return true(self, work, name, members, counted)

    monkeypatch.setattr(kept.Kept, "batch", batch)
    return computed


@pytest.mark.parametrize(
    ("task", "protocol"),
    [
        *((task, "question-inside") for task in ("recall_em", "prose", "agreement")),
        ("recall", "context-first"),
    ],
)
def test_a_killed_run_goes_on_and_gives_the_same_cells(words, tmp_path, monkeypatch, capsys, task, protocol):
    if task == "prose":
        words[-3:-1] = ["int8"]  # the others go through stories token by token
    words = [*words, task, "--protocol", protocol, "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    out = tmp_path / "killed"
    with monkeypatch.context() as patch:
        first = killed_after(patch, 2)
        assert main([*words, str(out)]) == 130
    assert capsys.readouterr().err.splitlines()[-1].endswith(", behind 2 finished batches of documents")
    assert len(first) == 2 and not list((out / "cells").glob("*.json"))
    (file,) = (out / "partial").glob("*.jsonl")
    file.write_bytes(file.read_bytes()[:-9])  # it was killed while it wrote the second line
    with monkeypatch.context() as patch:
        second = killed_after(patch, 1000)
        assert main([*words, str(out)]) == 0
    assert second[0] == first[1] and first[0] not in second
    assert cells(out) == cells(tmp_path / "whole")
    assert not (out / "partial").exists()


def test_a_method_that_fails_costs_the_others_nothing(words, tmp_path, monkeypatch, capsys):
    """It fails in the second batch; what goes on has the others' answers, and fails again."""
    from eval.accuracy.scoring import Scorer

    true, asked = Scorer._look, []

    def look(self, name, *rest):
        asked.append(name)
        if name == "h2o:budget=0.3" and asked.count(name) == 2:
            raise ValueError("no room")
        return true(self, name, *rest)

    monkeypatch.setattr(Scorer, "_look", look)
    words = [*words, "recall", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        assert main(words) == 130
    asked.clear()
    assert main(words) == 1
    assert "failed: h2o:budget=0.3 on recall: no room" in (said := capsys.readouterr().err)
    assert "Traceback" not in said and "no room" in (tmp_path / "errors.log").read_text()
    made = cells(tmp_path)
    assert len(made) == 4 and not (tmp_path / "partial").exists()
    assert main(words) == 0  # the third time it does not fail
    assert len(cells(tmp_path)) == 6 and made.items() <= cells(tmp_path).items()


def test_a_flipped_bit_costs_the_batches_of_its_line(tmp_path):
    clock = SimpleNamespace(own={}, shared=0.0, set=lambda **kept: None)
    work = SimpleNamespace(
        caches=["full"], meters={}, held={}, contexts=Counter(), tokens=Counter(), errors={}, clock=clock
    )
    path, seed = tmp_path / "x.jsonl", random.randrange(10**6)
    file, draw = kept.Kept(path), random.Random(seed)
    for number in range(3):
        file.batch(work, "recall", [number], lambda number=number: {"full": [number]})
    whole, good = kept.Kept(path).found, path.read_bytes()
    assert len(whole) == 3
    for _ in range(60):
        damaged = bytearray(good)
        damaged[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        found = kept.Kept(path).found
        assert 1 <= len(found) < 3 and found.items() <= whole.items(), seed
