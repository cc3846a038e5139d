"""Show: stored cells are copied to docs/results, and fill the tables of the documents."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..core.digests import ROOT
from ..core.files import write_file
from . import ledger, tables
from .collect import draw, rows_of, write
from .studies import STUDIES

DOCUMENTS = [ROOT / "README.md"] + [
    ROOT / "docs" / f"{name}.md"
    for name in ("results", "protocols", "quantization", "toy_and_real", "gate", "ledger")
]
MARKED = re.compile(r"(<!-- results: ([^>]*?) -->\n).*?(<!-- end of results -->)", re.DOTALL)
TABLES: dict[str, Callable[..., str]] = {
    "gates": tables.verdicts, "answered": tables.answered, "ledger": ledger.table,
    "accuracy": tables.accuracy, "costs": tables.costs, "crossed": tables.crossed, "curves": tables.curves,
    "formats": tables.formats, "perplexity": tables.perplexity,
}  # fmt: skip


def report(measurement, store, show, wanted: list) -> None:
    """Each study's rows as one file with its pictures, and the documents' tables."""
    for name in measurement.studies or STUDIES:
        file = measurement.file(name)
        rows = rows_of(sorted(part for part in (measurement.folder / name).glob("*") if part.is_dir()))
        write(rows, STUDIES[name]["about"], file, show.line)
        if not rows:
            there = ", those of before are shown again" if file.is_file() else ""
            show.line(f"{name}: there are no cells yet{there}")
        if file.is_file():
            draw(file, STUDIES[name].get("points", False))
    for document in DOCUMENTS if measurement.in_documents else ():
        if document.is_file():
            write_file(document, filled(document.read_text(encoding="utf-8")))


def filled(text: str) -> str:
    """A document with its tables as the collected studies say: `<!-- results: NAME ARGUMENT ... -->`."""

    def written(match: re.Match) -> str:
        name, *arguments = match[2].split()
        try:
            table = TABLES[name](*arguments)
        except tables.NotMade as missing:
            table = str(missing)
        return f"{match[1]}{table}\n{match[3]}"

    return MARKED.sub(written, text)
