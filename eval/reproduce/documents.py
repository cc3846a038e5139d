"""Show: stored cells brought into docs/results, and set into the tables of the documents."""

from __future__ import annotations

from pathlib import Path

from ..core.digests import ROOT
from ..core.files import write_json
from ..report.records import provenance
from ..report.table import printed
from . import peers, steps, tables, timed
from .collect import beside, collect, show_flat, write_with_others
from .studies import STUDIES

KERNELS = "Attention of a decode step by the kernels, CPU time, with nothing in the processor's cache"
RESULTS = ROOT / "docs" / "results"


def report(measurement, store, show, wanted: list) -> None:
    """Show what one of these measurements has stored."""
    {"reproduce": studies, "peers": pairs, "steps": decode_steps, "attention": kernels}[measurement.name](
        measurement, store, show
    )


def studies(measurement, store, show) -> None:
    """Each study's rows as one file with its flat table and pictures, and the documents' tables."""
    for name in measurement.studies or STUDIES:
        file = measurement.file(name)
        folders = sorted(part for part in (measurement.folder / name).glob("*") if part.is_dir())
        count, before = collect(name, STUDIES[name]["about"], folders, file)
        there = ", those of before are shown again" if file.is_file() else ""
        none = f"{name}: there are no cells yet{there}"
        show.line(f"{name}: {count} rows in {file}{beside(before)}" if count else none)
        if file.is_file():
            show_flat(file, STUDIES[name].get("points", False))
    if measurement.in_documents:
        fill()


def pairs(measurement, store, show) -> None:
    """peers.json beside the cells; with --collect in docs/results, and the tables of docs/results.md."""
    rows = [row | provenance(cell, "data") for cell, row in peers.named_rows(store.records())]
    file = (RESULTS if measurement.collect else Path(store.out)) / "peers.json"
    _write(rows, peers.ABOUT, ("model", "task", "protocol", "method"), file, measurement.collect, show)


def decode_steps(measurement, store, show) -> None:
    cells = [cell for cell in map(store.load, measurement.asked()) if cell]
    rows = [row | provenance(cell, "text") for cell, row in steps.named_rows(cells)]
    for line in timed.lines(rows):
        show.line(line)
    if measurement.collect:
        _write(rows, steps.ABOUT, ("model", "shape", "context", "simd"), RESULTS / "speed.json", True, show)


def kernels(measurement, store, show) -> None:
    """OUT/attention.json and its tables; with --collect in docs/results, too."""
    cells = [cell for cell in map(store.load, measurement.cells()) if cell]
    rows = []
    for cell in sorted(cells, key=lambda cell: cell["config"]["tokens"]):
        about = {"simd": cell["config"]["simd"], "threads": cell["machine"]["threads"]}
        rows += [about | provenance(cell, "data") | row for row in cell["rows"]]
    write_json(store.out / "attention.json", rows)
    for table in timed.attention(rows):
        printed(table)
    if measurement.collect:
        _write(rows, KERNELS, ("simd", "threads", "tokens"), RESULTS / "attention.json", True, show)


def _write(rows: list[dict], about: str, of_cell: tuple, file: Path, in_documents: bool, show) -> None:
    write_with_others(rows, about, of_cell, file, show.line)
    if rows and in_documents:
        fill()


def fill() -> None:
    for document in tables.DOCUMENTS:
        tables.fill(document)
