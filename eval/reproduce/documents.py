"""Show: stored cells are copied to docs/results, and fill the tables of the documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas

from ..core.digests import ROOT
from ..core.files import write_file
from ..report.records import provenance
from . import gates, ledger, steps, tables, timed
from .collect import rows_of, show_flat, write
from .studies import STUDIES

DOCUMENTS = [ROOT / "README.md"] + [
    ROOT / "docs" / f"{name}.md"
    for name in ("results", "protocols", "quantization", "toy_and_real", "performance", "gate", "ledger")
]
MARKED = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
RESULTS = ROOT / "docs" / "results"
TABLES: dict[str, Callable[..., str]] = {
    "speed": timed.speed, "gates": gates.verdicts, "calibrated": gates.calibrated, "answers": gates.answers,
    "ledger": ledger.table, "accuracy": tables.accuracy, "beside": tables.beside, "costs": tables.costs,
    "curves": tables.curves, "formats": tables.formats, "perplexity": tables.perplexity,
    "reuse": tables.reuse,
}  # fmt: skip


def report(measurement, store, show, wanted: list) -> None:
    """Show what is stored, as files of rows and tables; in the documents, too, where that was asked for."""
    if measurement.name == "reproduce":
        studies(measurement, show)
    else:
        timings(measurement, [cell for cell in map(store.load, wanted) if cell], Path(store.out), show)
    if measurement.in_documents:
        fill()


def timings(measurement, cells: list[dict], out: Path, show) -> None:
    """The rows of these cells of steps as one file, and printed."""
    rows = [row | provenance(cell, "data") for cell, row in steps.named_rows(cells)]
    for folder in (out, RESULTS) if measurement.in_documents else (out,):
        write(rows, steps.ABOUT, steps.OF_CELL, folder / "speed.json", show.line)
    print(pandas.DataFrame(rows).reindex(columns=steps.COLUMNS).to_string(index=False, na_rep="–"))


def studies(measurement, show) -> None:
    """Each study's rows as one file with its flat table and pictures."""
    for name in measurement.studies or STUDIES:
        file = measurement.file(name)
        rows = rows_of(sorted(part for part in (measurement.folder / name).glob("*") if part.is_dir()))
        write(rows, STUDIES[name]["about"], ("model", "protocol", "task", "method"), file, show.line)
        if not rows:
            there = ", those of before are shown again" if file.is_file() else ""
            show.line(f"{name}: there are no cells yet{there}")
        if file.is_file():
            show_flat(file, STUDIES[name].get("points", False))


def fill() -> None:
    """Rewrite the marked tables of the documents."""
    for document in DOCUMENTS:
        if document.is_file():
            write_file(document, filled(document.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """A document with its tables as the collected studies say: `<!-- results: NAME ARGUMENT ... -->`."""

    def written(match: re.Match) -> str:
        name, *arguments = match[2].split()
        return f"{match[1]}{TABLES[name](*arguments)}\n{match[3]}"

    return MARKED.sub(written, text)
