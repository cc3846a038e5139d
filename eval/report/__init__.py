"""The report: tables in the terminal, plots, and one self-contained page.

Everything comes from the stored cells: `python -m eval report --out DIR` makes it again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from kvlab.extras import needs

from ..core.comparable import comparable
from ..core.errors import Problem
from ..core.files import write_file
from ..core.progress import Verbatim
from ..core.results import RUN, Store

needs("lm_eval", "pandas", "matplotlib")  # chapter 8 begins with this package

from . import answers, formats, records  # noqa: E402
from .page import draw, render, templates  # noqa: E402
from .tables import boards, named, tabled, together  # noqa: E402
from .terminal import print_tables  # noqa: E402

ALL = "all"  # --against all
__all__ = ["RUN", "report", "write"]


def report(measurement, store: Store, show, wanted: list) -> None:
    """Tables, plots and the page of a run. Raises Problem where cells are of another schema."""
    names = {"any_code": "any_code", "against": "against", "form": "format"}
    how = {name: getattr(measurement, ours) for name, ours in names.items() if hasattr(measurement, ours)}
    with records.of_our_schema(f"--out {store.where}"):
        write(store, wanted, **how)


def write(
    store: Store,
    wanted: Iterable = (),
    console: Console | None = None,
    any_code: bool = False,
    against: str | None = None,
    form: str = "html",
) -> list[Path]:
    """Write summary.json, speed.json, accuracy.csv, accuracy.parquet, the plots and report.html; print the
    tables. Returns the paths.

    wanted: the cells that were asked for now, which say what is in the first table (`core.comparable`);
    any_code: cells that other code made are shown as well, marked. against: the method that others are
    compared with (`full`), or ALL, which prints the tables of every two. form: as
    --format, written beside the page. Raises Problem where there are no
    cells for a table.
    """
    cells, left_out = comparable(tabled(store.records()), wanted, any_code)
    if not cells and not wanted:
        raise Problem(f"--out {store.where}: there are no cells of accuracy or speed in this folder")
    store.write_tables(cells)
    base = "full" if against in (None, ALL, "full") else named(against, cells)
    found = boards(cells, left_out, base)
    figures = [figure for board in found for figure in draw(board, store.out, found[0])]
    page, asked = store.out / "report.html", answers.write(found, store, templates())
    write_file(page, render(found, figures, store, asked))
    told = [row | {"against": base} for board in found for row in board.rows]
    files = records.write(told, store.out / "accuracy") if told else []
    console = console or Verbatim()
    for group in together(found):
        print_tables(group, console, every_two=against == ALL)
    made = [page] if form == "html" else [page, formats.write(form, found, figures, store.out)]
    if asked:
        more = f" (first those that {base} gets right and another method gets wrong: {asked[1]})"
        first = more if asked[1] else ""
        console.print(f"answers: {store.home.at(asked[0].name)}{first}", soft_wrap=True, markup=False)
    console.print(f"report: {store.home.at(made[-1].name)}", soft_wrap=True, markup=False)
    return [*made, *files, *(figure["path"] for figure in figures)]
