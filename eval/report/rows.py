"""What studies of rows share: one file of rows, the machine beside it, and lines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..core.results import write_json


def write_rows(cells: dict[str, dict], out: Path, name: str, show, line: Callable[[dict], str]) -> list[dict]:
    """Write OUT/NAME.json, the rows of {experiment: cell}, and OUT/NAME-machine.json; show every row as a
    line. Returns the rows."""
    rows = [row for cell in cells.values() for row in cell["rows"]]
    write_json(out / f"{name}.json", rows)
    for experiment, cell in cells.items():
        write_json(out / f"{name}-machine.json", cell["machine"])
        show.line(f"{experiment}:")
        for text in (*map(line, cell["rows"]), *(f"  {note}" for note in cell.get("notes", ()))):
            show.line(text)
    return rows
