"""The report: tables in the terminal, plots, and one page that stands by itself.

Everything comes from the stored cells: `python -m eval report --out DIR` makes it again at any time.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from ..core.results import RUN, Store
from .page import draw, render
from .tables import boards
from .terminal import print_tables

__all__ = ["RUN", "write"]


def write(store: Store, console: Console | None = None) -> list[Path]:
    """Write summary.json, speed.json, the plots and report.html; print the tables. Returns the paths."""
    store.write_tables()
    found = boards(list(store.records()))
    figures = [figure for board in found for figure in draw(board, store.out, len(found) > 1)]
    page = store.out / "report.html"
    page.write_text(render(found, figures, store), encoding="utf-8")
    console = console or Console(highlight=False)
    for board in found:
        print_tables(board, console)
    console.print(f"report: {page}", soft_wrap=True)
    return [page, *(figure["path"] for figure in figures)]
