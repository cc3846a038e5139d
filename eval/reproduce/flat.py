"""Flat: a collected study as one flat table, CSV and Parquet, for those who read it elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..report import rows

NAMES = ("model", "protocol", "task", "method", "budget")


def line(row: dict) -> dict:
    """A collected row with what counts: names, score, bytes a sequence, McNemar's p against `full`, and
    whether methods are compared there, which they are not where `full` does not beat guessing. A perplexity
    has its chunks for n, and neither protocol, standard error, p nor that."""
    read = "perplexity" in row
    held = row["bytes"] if read else row
    found = {name: row.get(name) for name in NAMES}
    if read:
        found |= {"metric": "perplexity", "score": row["perplexity"], "stderr": None, "n": len(row["values"])}
    else:
        found |= {"metric": row["metric"], "score": row["value"], "stderr": row["stderr"], "n": row["n"]}
    return found | {
        "bytes_held": held["device_bytes"] + held["host_bytes"],
        "bytes_moved": held["moved_bytes"],
        "p": row.get("p"),
        "compared": row.get("compared"),
    }


def write(told: Iterable[dict], file: Path) -> list[Path]:
    """A study's rows as CSV and Parquet beside its JSON `file`; returns their paths."""
    return rows.write([line(row) for row in told], file.with_suffix(""))
