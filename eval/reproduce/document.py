"""Document: the stored cells of one measurement as one JSON file, and the documents that show them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..core.files import write_file
from ..report import steps
from . import peers, tables
from .collect import text


def write_peers(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """The rows of `python -m eval peers`; fill: the documents' tables are written anew."""
    _write(peers.rows(cells), peers.ABOUT, file, fill, show)


def write_steps(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """The rows of `python -m eval steps`; fill: as above."""
    _write(steps.rows(cells), steps.ABOUT, file, fill, show)


def _write(rows: list[dict], about: str, file: Path, fill: bool, show) -> None:
    if not rows:
        return
    write_file(file, text(file.stem, about, rows))
    show.line(f"{len(rows)} rows in {file}")
    if fill:
        for document in tables.DOCUMENTS:
            tables.fill(document)
