"""What is printed: a table, and a file of rows, line by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.table import Table as Drawn

from ..core.files import write_json
from ..core.show import Verbatim
from ..core.table import Table


def printed(table: Table) -> None:
    """Print it to the terminal."""
    drawn, console = Drawn(title=table.title or None, box=box.SIMPLE, pad_edge=False), Verbatim()
    for index, head in enumerate(table.head):
        drawn.add_column(head, justify="left" if index < table.words else "right")
    for line in table.body:
        drawn.add_row(*line)
    console.print(drawn)
    if table.note:
        console.print(table.note)


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
