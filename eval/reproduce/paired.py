"""Paired: the stored cells of `python -m eval peers` as one JSON file, and the documents that show them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..core.files import write_file
from . import peers, tables
from .collect import text


def write(cells: Iterable[dict], file: Path, fill: bool, show) -> None:
    """Write the cells' rows to `file`; fill: the documents' tables are written anew."""
    rows = peers.rows(cells)
    write_file(file, text(file.stem, peers.ABOUT, rows))
    show.line(f"{len(rows)} rows in {file}")
    if fill:
        for document in tables.DOCUMENTS:
            tables.fill(document)
