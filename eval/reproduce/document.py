"""Document: the stored cells of one measurement as one JSON file, and the documents that show them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..core.files import write_file
from ..report import attention, steps
from . import peers, tables
from .collect import read, text


def write_peers(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """The rows of `python -m eval peers`; fill: the documents' tables are written anew."""
    _write(peers.rows(cells), peers.ABOUT, ("model", "task", "protocol", "method"), file, fill, show)


def write_steps(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """The rows of `python -m eval steps`; fill: as above."""
    _write(steps.rows(cells), steps.ABOUT, ("model", "shape", "context", "simd"), file, fill, show)


def write_attention(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """The rows of `python -m eval attention`; fill: as above."""
    _write(attention.rows(cells), attention.ABOUT, ("simd", "tokens"), file, fill, show)


def _write(rows: list[dict], about: str, of_cell: tuple, file: Path, fill: bool, show) -> None:
    """These rows, and those that the file has of cells that are not here; of_cell: what cells differ in."""
    if not rows:
        return
    before = elsewhere(rows, of_cell, file)
    write_file(file, text(file.stem, about, rows + before))
    beside = f", beside {len(before)} of before, whose cells are not here" if before else ""
    show.line(f"{len(rows)} rows in {file}{beside}")
    if fill:
        for document in tables.DOCUMENTS:
            tables.fill(document)


def elsewhere(rows: list[dict], of_cell: tuple, file: Path) -> list[dict]:
    """The file's rows of other cells than these rows are of."""
    place = lambda row: [row.get(key) for key in of_cell]
    made = [place(row) for row in rows]
    stored = read(file) if file.is_file() else []
    return [row for row in stored if place(row) not in made]
