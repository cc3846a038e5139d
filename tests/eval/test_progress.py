"""What a run says while it goes on, where there is no terminal: a line for every cell, and the time left."""

import contextlib
import errno
import time

from eval.command import main
from eval.core import progress as showing
from eval.core.measurement import Cell, Measurement, option
from eval.core.progress import Show
from eval.core.results import Store


class Slow(Measurement):
    """Three cells; the second takes long."""

    name, about = "slow", ""
    pause: float = option("", 0.0)

    def cells(self):
        return [Cell("m", "", f"part {i}", {}) for i in range(3)]

    def made(self, cells, bar):
        for cell in cells:
            bar.at(cell.task, 0)
            time.sleep(0.5 if cell.task == "part 1" else 0)
            yield cell, {"device": "cpu", "seconds": 0.5, "rows": [1, 2]}
            bar.at(cell.task, 1)


def test_a_line_for_every_cell_and_no_long_silence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(showing, "SILENT", 0.2)
    store = Store(tmp_path)
    store.prepare()
    assert Slow(out=tmp_path).run(store, Show(tmp_path)) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1/3 part 0: 2 rows" or lines[0].startswith("1/3 part 0: 2 rows, about ")
    assert lines[1].startswith("1/3 slow, at part 1, about ")
    assert [line.split(":")[0] for line in lines if "rows" in line] == [
        f"{i + 1}/3 part {i}" for i in range(3)
    ]
    assert lines[-1] == "3/3 part 2: 2 rows"


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
        assert Slow(out=tmp_path).run(store, Show(tmp_path)) == 0
    assert len(list(store.records())) == 3
    assert main(["accuracy", *quick, "0"]) == 0
    page = tmp_path / "out" / "report.html"
    page.unlink()
    with contextlib.redirect_stdout(Gone()):
        assert main(["accuracy", *quick, "0"]) == 0
    assert page.exists()
