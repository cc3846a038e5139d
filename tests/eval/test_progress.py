"""What a run says while it goes on, where there is no terminal: a line for every cell, and the time left."""

from __future__ import annotations

import contextlib
import errno
import time
from pathlib import Path

from eval.__main__ import main
from eval.core import show as showing
from eval.core.measurement import Cell, Measurement, option, run
from eval.core.results import Store
from eval.core.show import Show


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
