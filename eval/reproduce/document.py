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
    _write(attention.rows(cells), attention.ABOUT, ("simd", "threads", "tokens"), file, fill, show)


def _write(rows: list[dict], about: str, of_cell: tuple, file: Path, fill: bool, show) -> None:
    """These rows, and those that the file has of cells that are not here."""
    if not rows:
        return
    told = with_others(rows, of_cell, file)
    write_file(file, text(file.stem, about, told))
    before = len(told) - len(rows)
    beside = f", beside {before} of before, whose cells are not here" if before else ""
    show.line(f"{len(rows)} rows in {file}{beside}")
    if fill:
        for document in tables.DOCUMENTS:
            tables.fill(document)


def with_others(rows: list[dict], of_cell: tuple, file: Path) -> list[dict]:
    """These rows and the file's of other cells, in the file's order, what is new behind; of_cell: what cells
    differ in."""
    place = lambda row: repr([row.get(key) for key in of_cell])
    made, stored = {place(row) for row in rows}, read(file) if file.is_file() else []
    order = {one: at for at, one in enumerate(dict.fromkeys(map(place, stored)))}
    told = rows + [row for row in stored if place(row) not in made]
    return sorted(told, key=lambda row: order.get(place(row), len(order)))
