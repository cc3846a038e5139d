"""Collect: the stored cells of a study as one JSON file, every row with what it stands on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..core.alike import alike
from ..core.files import finite, write_file
from ..core.results import Store
from ..report import rows
from ..report.budgets import curves, drawable
from ..report.perplexity import against_bits
from ..report.plots import save
from ..report.tables import boards, tabled
from . import flat

SHARED = (  # what many rows have in common, told once
    "model", "protocol", "evict", "shots", "num_fewshot", "limit", "dtype", "batch_size", "metadata",
    "gen_kwargs", "chunk", "prompt", "model_digest", "code_digest", "machine", "device", "torch",
)  # fmt: skip
ASKED = (  # what rows beside each other were asked alike
    "num_fewshot", "limit", "dtype", "metadata", "gen_kwargs", "chunk", "prompt", "evict", "data_digest",
    "model_digest",
)  # fmt: skip


def collect(name: str, about: str, folders: Iterable[Path], file: Path) -> tuple[int, int]:
    """Write the rows of these folders' cells to `file`, and those that it has, whose cells lie elsewhere (see
    `others`); returns how many there are of both. Cells that were made under other settings than the newest
    of their folder are left out."""
    told, out = [], set()
    for folder in folders:
        records = list(Store(folder).records())
        there = tabled(records)
        cells, _ = alike(there)
        out |= {_of_cell(cell) for cell in there} - {_of_cell(cell) for cell in cells}
        told += [unplaced(named) | {"outcomes": outcomes(cell)} for cell, named in with_rows(cells)]
        told += [perplexity(cell) for cell in records if "perplexity" in cell]
    stored = read(file) if told and file.is_file() else []
    before = others(told, stored, out)
    if told:
        write_file(file, text(name, about, in_order(told + before, stored) if before else told))
    return len(told), len(before)


def in_order(rows: list[dict], stored: list[dict]) -> list[dict]:
    """Rows in the order of those that are stored: protocol and task by their first row, then method; what is
    new comes behind."""
    order: dict[tuple, int] = {}
    for row in stored:
        for key in (_place(row), (*_place(row), row["method"])):
            order.setdefault(key, len(order))
    last = len(order)
    return sorted(
        rows, key=lambda row: [order.get(key, last) for key in (_place(row), (*_place(row), row["method"]))]
    )


def _place(row: dict) -> tuple:
    return tuple(row.get(key) for key in ("model", "protocol", "task"))


def _of_cell(cell: dict) -> tuple:
    """A cell's model, protocol, task and method, as its row names them."""
    row = {"model": cell["model"], "protocol": cell["config"].get("protocol"), "task": cell["task"]}
    return (*_place(row), unplaced({"method": cell["method"], "curve": ""})["method"])


def others(told: list[dict], stored: list[dict], out: Iterable[tuple] = ()) -> list[dict]:
    """The stored rows that stand beside these: of another method, or another model, protocol or task. Where
    this one was asked in another way now (`ASKED`: other documents, say), or `full`, which rows are compared
    with, answered otherwise, none does. out: (model, protocol, task, method) of cells that lie here and were
    left out, whose rows go as well."""
    how = lambda row: [row.get(key) for key in ASKED]
    asked = {_place(row): how(row) for row in told}
    gone = {(*_place(row), row["method"]) for row in told} | set(out)
    now, before = (
        {_place(row): row.get("outcomes") for row in rows if row["method"] == "full"}
        for rows in (told, stored)
    )
    moved = {place for place in now if place in before and now[place] != before[place]}
    return [
        row
        for row in stored
        if (*_place(row), row["method"]) not in gone
        and _place(row) not in moved
        and asked.get(_place(row), how(row)) == how(row)
    ]


def show(file: Path, points: bool = False) -> None:
    """A collected study beside its `file` as CSV and Parquet, and as a picture for each protocol: of its
    budgets, or with `points`, where it has one, of its methods."""
    told, name = read(file), file.stem
    flat.write(told, file)
    whole = [row for row in told if "perplexity" in row and row["budget"] is None]
    if whole and len(whole) == len(told) and len({row["model"] for row in whole}) == 1:
        save(against_bits(told), file.with_name(f"{name}-bits"), "png")
    for protocol in dict.fromkeys(row["protocol"] for row in told if "protocol" in row):
        shown = drawable([row for row in told if row["protocol"] == protocol], points)
        if shown:
            save(curves(shown), file.with_name(f"{name}-{protocol}"), "png")


def with_rows(cells: list[dict]) -> list[tuple[dict, dict]]:
    """(cell, its row) in the order of the tables."""
    found = rows.rows(boards(cells)) if cells else []
    known = {(c["model"], c["method"], c["task"]): c for c in cells}
    return [(known[row["model"], row["method"], row["task"]], row) for row in found]


def unplaced(row: dict) -> dict:
    """A row whose method names a profile by its file alone, not by the folder that it lay in."""
    return row | {name: re.sub(r"profile=[^,]*/", "profile=", row[name]) for name in ("method", "curve")}


def outcomes(cell: dict) -> str | list:
    """Each document's outcome, in their order: 0 and 1 as one text, else a list."""
    values = cell["values"][cell["metrics"][0]["metric"]]
    if all(value in (0, 1) for value in values):
        return "".join(str(int(value)) for value in values)
    return values


def perplexity(cell: dict) -> dict:
    """A cell of the measurement perplexity as a row."""
    curve, budget = rows.curve_of(cell["method"])
    config = cell["config"]
    named = {name: cell[name] for name in ("model", "task", "method")} | {"curve": curve, "budget": budget}
    named |= {name: cell[name] for name in ("perplexity", "values", "rows", "bytes", "scored")}
    named |= {name: config.get(name) for name in ("limit", "dtype", "batch_size", "chunk", "prompt")}
    return named | rows.provenance(cell, "text")


def text(name: str, about: str, told: list[dict]) -> str:
    """The file: settings that rows share, then one row a line, which names its settings by their place."""
    settings: list[dict] = []
    lines = []
    for row in told:
        mine = {key: row[key] for key in SHARED if row.get(key) is not None}
        if mine not in settings:
            settings.append(mine)
        rest = {key: rounded(value) for key, value in row.items() if key not in (*SHARED, "settings")}
        lines.append({"settings": settings.index(mine)} | rest)
    parts = [f'"study": {dumped(name)}', f'"about": {dumped(about)}']
    for key, some in (("settings", settings), ("rows", lines)):
        joined = ",\n".join(map(dumped, some))
        parts.append(f'"{key}": [\n{joined}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def dumped(value) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False)


def rounded(value):
    """Floats with six digits that count: more are noise in a file that people compare."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def read(file: Path) -> list[dict]:
    """The rows of a collected file, each with its settings."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [stored["settings"][row["settings"]] | row for row in stored["rows"]]
