"""Show: stored cells are copied to docs/results, and fill the tables of the documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas

from ..core.digests import ROOT
from ..core.files import write_file
from ..report.records import provenance
from . import gates, ledger, peers, rehearsal, steps, tables, timed
from .collect import rows_of, show_flat, write
from .studies import STUDIES

DOCUMENTS = [ROOT / "README.md"] + [
    ROOT / "docs" / f"{name}.md"
    for name in ("results", "protocols", "quantization", "toy_and_real", "performance", "gate", "ledger")
]
MARKED = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
RESULTS = ROOT / "docs" / "results"
KERNELS = "Attention of a decode step by the kernels, CPU time, with nothing in the processor's cache"


def report(measurement, store, show, wanted: list) -> None:
    """Show what these cells hold, as a file of rows and a table; with --collect in the documents, too."""
    if measurement.name == "reproduce":
        studies(measurement, show)
        return
    name, about, rows_of_cells, of_cell, columns = KINDS[measurement.name]
    cells = [cell for cell in map(store.load, wanted) if cell]
    rows = [row | provenance(cell, "data") for cell, row in rows_of_cells(cells)]
    for folder in (Path(store.out), RESULTS) if measurement.collect else (Path(store.out),):
        write(rows, about, of_cell, folder / f"{name}.json", show.line)
    print(pandas.DataFrame(rows).reindex(columns=columns).to_string(index=False, na_rep="–"))
    if measurement.collect:
        fill()


def kernel_rows(cells: list[dict]):
    """(stored cell, one of its rows without the cell's provenance)."""
    for cell in sorted(cells, key=lambda cell: cell["config"]["tokens"]):
        about = {"simd": cell["config"]["simd"], "threads": cell["machine"]["threads"]}
        yield from ((cell, about | row) for row in cell["rows"])


def studies(measurement, show) -> None:
    """Each study's rows as one file with its flat table and pictures, and the documents' tables."""
    for name in measurement.studies or STUDIES:
        file = measurement.file(name)
        rows = rows_of(sorted(part for part in (measurement.folder / name).glob("*") if part.is_dir()))
        write(rows, STUDIES[name]["about"], ("model", "protocol", "task", "method"), file, show.line)
        if not rows:
            there = ", those of before are shown again" if file.is_file() else ""
            show.line(f"{name}: there are no cells yet{there}")
        if file.is_file():
            show_flat(file, STUDIES[name].get("points", False))
    if measurement.in_documents:
        fill()


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


TABLES: dict[str, Callable[..., str]] = {
    "kernels": timed.kernels, "peers": timed.pairs, "speed": timed.speed, "gates": gates.verdicts,
    "foreseen": gates.foreseen, "calibrated": gates.calibrated, "answers": gates.answers,
    "ledger": ledger.table, "accuracy": tables.accuracy, "beside": tables.beside, "costs": tables.costs,
    "curves": tables.curves, "formats": tables.formats, "lengths": tables.lengths,
    "perplexity": tables.perplexity, "reuse": tables.reuse, "rehearsal": rehearsal.table,
}  # fmt: skip
KINDS = {  # measurement -> file, what it holds, rows of cells, what cells differ in, columns that are printed
    "peers": (
        "peers", peers.ABOUT, peers.named_rows, ("model", "task", "protocol", "method"),
        ["model", "task", "protocol", "method", "alike", "same_heads", "apart"],
    ),
    "steps": (
        "speed", steps.ABOUT, steps.named_rows, ("model", "shape", "context", "simd"),
        ["model", "shape", "context", "threads", "engine", "method", "cpu_ms", "wall_ms", "fraction"],
    ),
    "attention": (
        "attention", KERNELS, kernel_rows, ("simd", "threads", "tokens"),
        ["shape", "kernel", "tokens", "bits", "ms", "bytes", "fraction_of_bandwidth", "speedup"],
    ),
}  # fmt: skip
