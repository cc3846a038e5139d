"""A folder of results as one tidy pandas frame: a row for each stored number, with its provenance."""

from __future__ import annotations

import json
from pathlib import Path

import pandas

from ..core.comparable import SPEED
from ..core.errors import Problem
from ..core.files import address
from ..core.results import Store
from .records import curve_of, of_our_schema, provenance, row
from .tables import tabled

FIRST = (
    "task", "method", "curve", "budget", "protocol", "limit", "dtype", "model", "metric", "score", "stderr",
    "n", "bytes", "context", "ms",
)  # fmt: skip


def results(where: str | Path) -> pandas.DataFrame:
    """Every cell of accuracy or speed in a folder, or at an address, as a row.

    score: the main metric, a share between 0 and 1 or a perplexity, with its standard error over `n`
    documents. bytes: held on device and host, per sequence. ms: per token, at a `context` (speed only).
    lost, won, p, differs: beside `full` under the same settings. Raises ValueError where there are no cells,
    or some of another schema.
    """
    with of_our_schema(where):
        return _frame(where)


def _frame(where: str | Path) -> pandas.DataFrame:
    cells = list(tabled(Store(address(str(where))).records()))
    if not cells:
        raise Problem(f"{where}: there are no cells of accuracy or speed in this folder")
    full = {_asked(cell): cell for cell in cells if cell["method"] == "full"}
    rows = []
    for cell in cells:
        if cell["task"].startswith(SPEED):
            rows += _timed(cell)
        else:
            reference = full.get(_asked(cell))
            told = row(cell, reference, reference)
            rows.append(told | {"score": told.pop("value"), "bytes": _held(told)})
    frame = pandas.DataFrame(rows)
    return frame.reindex(columns=[*FIRST, *(name for name in frame if name not in FIRST)])


def _asked(cell: dict) -> str:
    """What a cell was asked, whatever the method."""
    return json.dumps([cell["model"], cell["task"], cell["config"] | {"method": None}], sort_keys=True)


def _timed(cell: dict) -> list[dict]:
    config, (curve, budget) = cell["config"], curve_of(cell["method"])
    names = {key: cell[key] for key in ("task", "method", "model")} | {"curve": curve, "budget": budget}
    names |= {key: config.get(key) for key in ("limit", "dtype")}
    return [
        names | line | {"ms": line["decode_ms"], "bytes": _held(line)} | provenance(cell, "task")
        for line in cell["rows"]
    ]


def _held(told: dict) -> float | None:
    sizes = [told.get(name) for name in ("device_bytes", "host_bytes")]
    return None if None in sizes else sum(sizes)
