"""A table as data, and the ways to print one: Markdown, the terminal; a file of rows, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table as Drawn

from ..core.files import write_json
from ..core.show import Verbatim


@dataclass(frozen=True)
class Table:
    """head: a title for every column. body: lines of texts. title: stands above. note: stands below. words:
    how many columns, from the left, hold words; the others hold numbers."""

    head: Sequence[str]
    body: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    words: int = 1


def markdown(table: Table) -> str:
    rule = ["---"] * table.words + ["--:"] * (len(table.head) - table.words)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (table.head, rule, *table.body))
    return "\n\n".join(filter(None, (table.title, lines, table.note)))


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
