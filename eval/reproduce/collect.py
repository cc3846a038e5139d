"""Collect: stored cells as one JSON file of rows, each with what it stands on, and as a flat table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ..core.comparable import comparable
from ..core.files import finite, write_file
from ..core.results import Store
from ..report import records
from ..report.budgets import curves, drawable
from ..report.perplexity import against_bits
from ..report.plots import save
from ..report.tables import boards, tabled

SHARED = (  # what many rows have in common, told once
    "model", "protocol", "evict", "shots", "num_fewshot", "limit", "dtype", "batch_size", "metadata",
    "gen_kwargs", "chunk", "prompt", "model_digest", "code_digest", "machine", "device", "torch",
)  # fmt: skip
ASKED = (  # what rows beside each other were asked alike
    "num_fewshot", "limit", "dtype", "metadata", "gen_kwargs", "chunk", "prompt", "evict", "data_digest",
    "model_digest",
)  # fmt: skip
PLACE = ("model", "protocol", "task")
NAMES = (*PLACE, "method", "budget")  # of the flat table


def collect(name: str, about: str, folders: Iterable[Path], file: Path) -> tuple[int, int]:
    """Write the rows of these folders' cells to `file`, and those that it has, whose cells lie elsewhere (see
    `others`); returns how many there are of both. Cells that were made under other settings than the newest
    of their folder are left out."""
    made, out = [], set()
    for folder in folders:
        records = list(Store(folder).records())
        there = tabled(records)
        cells, _ = comparable(there)
        out |= {_of_cell(cell) for cell in there} - {_of_cell(cell) for cell in cells}
        made += [unplaced(named) | {"outcomes": outcomes(cell)} for cell, named in with_rows(cells)]
        made += [perplexity(cell) for cell in records if "perplexity" in cell]
    stored = read(file)
    before = others(made, stored, out)
    if made:
        key = lambda row: [place(row), place(row, (*PLACE, "method"))]
        write_file(file, text(name, about, in_order(made + before, stored, key) if before else made))
    return len(made), len(before)


def place(row: dict, names: tuple = PLACE) -> tuple:
    """Where a row stands."""
    return tuple(str(row.get(name)) for name in names)


def in_order(rows: list[dict], stored: list[dict], key: Callable[[dict], list]) -> list[dict]:
    """Rows in the order in which the parts of their key first stand in the stored ones; what is new comes
    behind."""
    order: dict = {}
    for row in stored:
        for part in key(row):
            order.setdefault(part, len(order))
    return sorted(rows, key=lambda row: [order.get(part, len(order)) for part in key(row)])


def with_others(rows: list[dict], of_cell: tuple, file: Path) -> list[dict]:
    """These rows and the file's of other cells, in the file's order; of_cell: what cells differ in."""
    made, stored = {place(row, of_cell) for row in rows}, read(file)
    rows = rows + [row for row in stored if place(row, of_cell) not in made]
    return in_order(rows, stored, lambda row: [place(row, of_cell)])


def write_with_others(rows: list[dict], about: str, of_cell: tuple, file: Path, say) -> None:
    """The file of these rows and those of other cells; says how many there are."""
    if rows:
        both = with_others(rows, of_cell, file)
        write_file(file, text(file.stem, about, both))
        say(f"{len(rows)} rows in {file}{beside(len(both) - len(rows))}")


def beside(before: int) -> str:
    return f", beside {before} of before, whose cells are not here" if before else ""


def _of_cell(cell: dict) -> tuple:
    """A cell's model, protocol, task and method, as its row names them."""
    row = {"model": cell["model"], "protocol": cell["config"].get("protocol"), "task": cell["task"]}
    return (*place(row), unplaced({"method": cell["method"], "curve": ""})["method"])


def others(made: list[dict], stored: list[dict], out: Iterable[tuple] = ()) -> list[dict]:
    """The stored rows that stand beside these: of another method, or another model, protocol or task. Where
    this one was asked in another way now (`ASKED`: other documents, say), or `full`, which rows are compared
    with, answered otherwise, none does. out: (model, protocol, task, method) of cells that lie here and were
    left out, whose rows go as well."""
    how = lambda row: [row.get(key) for key in ASKED]
    asked = {place(row): how(row) for row in made}
    gone = {(*place(row), row["method"]) for row in made} | set(out)
    now, before = (
        {place(row): row.get("outcomes") for row in rows if row["method"] == "full"}
        for rows in (made, stored)
    )
    moved = {at for at in now if at in before and now[at] != before[at]}
    return [
        row
        for row in stored
        if (*place(row), row["method"]) not in gone
        and place(row) not in moved
        and asked.get(place(row), how(row)) == how(row)
    ]


def show_flat(file: Path, points: bool = False) -> None:
    """A collected study beside its `file` as CSV and Parquet, and as a picture for each protocol: of its
    budgets, or with `points`, where it has one, of its methods."""
    found, name = read(file), file.stem
    write_flat(found, file)
    whole = [row for row in found if "perplexity" in row and row["budget"] is None]
    if whole and len(whole) == len(found) and len({row["model"] for row in whole}) == 1:
        save(against_bits(found), file.with_name(f"{name}-bits"), "png")
    for protocol in dict.fromkeys(row["protocol"] for row in found if "protocol" in row):
        shown = drawable([row for row in found if row["protocol"] == protocol], points)
        if shown:
            save(curves(shown), file.with_name(f"{name}-{protocol}"), "png")


def line(row: dict) -> dict:
    """A collected row with what counts: names, score, bytes a sequence, McNemar's p against `full`, and
    whether methods are compared there, which they are not where `full` does not beat guessing. A perplexity
    has its chunks for n, and neither protocol, standard error, p nor that."""
    read = "perplexity" in row
    held = row["bytes"] if read else row
    score = ("perplexity", row["perplexity"], None, len(row["values"])) if read else ()
    score = score or (row["metric"], row["value"], row["stderr"], row["n"])
    found = {name: row.get(name) for name in NAMES} | dict(zip(("metric", "score", "stderr", "n"), score))
    size = {"bytes_held": held["device_bytes"] + held["host_bytes"], "bytes_moved": held["moved_bytes"]}
    return found | size | {"p": row.get("p"), "compared": row.get("compared")}


def write_flat(found: Iterable[dict], file: Path) -> list[Path]:
    """A study's rows as CSV and Parquet beside its JSON `file`; returns their paths."""
    return records.write([line(row) for row in found], file.with_suffix(""))


def with_rows(cells: list[dict]) -> list[tuple[dict, dict]]:
    """(cell, its row) in the order of the tables."""
    found = records.rows(boards(cells)) if cells else []
    known = {(c["model"], c["method"], c["task"]): c for c in cells}
    return [(known[row["model"], row["method"], row["task"]], row) for row in found]


def unplaced(row: dict) -> dict:
    """A row whose method names a profile by its file alone, not by the folder that it lay in."""
    return row | {name: re.sub(r"profile=[^,]*/", "profile=", row[name]) for name in ("method", "curve")}


def outcomes(cell: dict) -> str | list:
    """Each document's outcome, in their order: 0 and 1 as one text, else a list."""
    values = cell["values"][cell["metrics"][0]["metric"]]
    return "".join(str(int(v)) for v in values) if all(v in (0, 1) for v in values) else values


def perplexity(cell: dict) -> dict:
    """A cell of the measurement perplexity as a row."""
    curve, budget = records.curve_of(cell["method"])
    named = {name: cell[name] for name in ("model", "task", "method")} | {"curve": curve, "budget": budget}
    named |= {name: cell[name] for name in ("perplexity", "values", "rows", "bytes", "scored")}
    named |= {name: cell["config"].get(name) for name in ("limit", "dtype", "batch_size", "chunk", "prompt")}
    return named | records.provenance(cell, "text")


def text(name: str, about: str, found: list[dict]) -> str:
    """The file: settings that rows share, then one row a line, which names its settings by their place."""
    settings: list[dict] = []
    lines = []
    for row in found:
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
    """The rows of a collected file, each with its settings; none where there is no file."""
    if not file.is_file():
        return []
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [stored["settings"][row["settings"]] | row for row in stored["rows"]]
