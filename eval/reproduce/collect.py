"""Collect: stored cells as one JSON file of rows, each with its provenance, and as pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..core.comparable import comparable
from ..core.files import finite, write_file
from ..core.results import Store
from ..report import records
from ..report.budgets import curves, drawable
from ..report.paper import place
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
OF_CELL = (*PLACE, "method")  # what cells differ in


def rows_of(folders: Iterable[Path]) -> list[dict]:
    """The rows of these folders' cells. Cells that were made under other settings than the newest of their
    folder are left out."""
    made = []
    for folder in folders:
        stored = list(Store(folder).records())
        cells, _ = comparable(tabled(stored))
        for board in boards([cell for cell in cells if not cell["apart"]]):
            known = {(cell["method"], cell["task"]): cell for cell in board.cells}
            for row in board.rows:
                cell = known[row["method"], row["task"]]
                made.append(unplaced(row) | others_of(cell) | {"outcomes": outcomes(cell)})
        by_age = sorted(
            (cell for cell in stored if "perplexity" in cell), key=lambda cell: cell.get("made", "")
        )
        newest = {(cell["model"], cell["method"], cell["task"]): cell for cell in by_age}
        made += map(perplexity, newest.values())
    return made


def write(rows: list[dict], about: str, file: Path, say) -> None:
    """The file of these rows and those that it has of other cells, in its order, new ones last; says how
    many there are."""
    if not rows:
        return
    stored, order = read(file), {}
    before, parts = others(rows, stored), (PLACE, OF_CELL)
    for row in stored:
        for names in parts:
            order.setdefault(place(row, names), len(order))
    where = lambda row: [order.get(place(row, names), len(order)) for names in parts]
    write_file(file, text(file.stem, about, sorted(rows + before, key=where)))
    beside = f", beside {len(before)} of before, whose cells are not here" if before else ""
    say(f"{len(rows)} rows in {file}{beside}")


def others(made: list[dict], stored: list[dict]) -> list[dict]:
    """The stored rows comparable with these: from other cells and, for the same model and task, asked in the
    same way (`ASKED`: the same documents, say)."""
    cells = {place(row, OF_CELL) for row in made}
    asked = {place(row, PLACE): place(row, ASKED) for row in made}
    beside = lambda row: asked.get(place(row, PLACE), place(row, ASKED)) == place(row, ASKED)
    return [row for row in stored if place(row, OF_CELL) not in cells and beside(row)]


def draw(file: Path, points: bool = False) -> None:
    """A collected study beside its `file` as a picture for each protocol and model: of its budgets, or with
    `points`, where it has one, of its methods. A further model's picture is named after it."""
    found, name = read(file), file.stem
    models = list(dict.fromkeys(row["model"] for row in found))
    for protocol, model in dict.fromkeys(
        (row["protocol"], row["model"]) for row in found if "protocol" in row
    ):
        mine = [row for row in found if (row["protocol"], row["model"]) == (protocol, model)]
        if shown := drawable(mine, points):
            further = (
                "" if model == models[0] else f"-{Path(model).name.removesuffix('.gguf').replace('.', '_')}"
            )
            save(curves(shown), file.with_name(f"{name}-{protocol}{further}"), "png")


def unplaced(row: dict) -> dict:
    """A row that names a file, of a model or a profile, by its name alone, not by the folder it lay in."""
    named = {name: re.sub(r"profile=[^,]*/", "profile=", row[name]) for name in ("method", "curve")}
    model = Path(row["model"]).name if row["model"].endswith(".gguf") else row["model"]
    return row | named | {"model": model}


def others_of(cell: dict) -> dict:
    """The task's further metrics, where it has some: `acc_norm`, say."""
    more = {one["metric"]: {"value": one["value"], "stderr": one["stderr"]} for one in cell["metrics"][1:]}
    return {"others": more} if more else {}


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
    return unplaced(named) | records.provenance(cell, "text")


def text(name: str, about: str, found: list[dict]) -> str:
    """The file: settings that rows share, then one row a line, which names its settings by their place."""
    settings: list[dict] = []
    lines = []
    for row in found:
        mine = {key: row[key] for key in SHARED if row.get(key) is not None}
        if mine not in settings:
            settings.append(mine)
        rest = {key: value for key, value in row.items() if key not in (*SHARED, "settings")}
        lines.append({"settings": settings.index(mine)} | rounded(rest))
    dumped = lambda value: json.dumps(value, ensure_ascii=False, allow_nan=False)
    parts = [f'"study": {dumped(name)}', f'"about": {dumped(about)}']
    for key, some in (("settings", settings), ("rows", lines)):
        joined = ",\n".join(map(dumped, some))
        parts.append(f'"{key}": [\n{joined}\n]')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(row: dict) -> dict:
    """Floats with six digits that count: more are noise in a file that people compare."""
    return json.loads(json.dumps(finite(row)), parse_float=lambda number: float(f"{float(number):.6g}"))


def read(file: Path) -> list[dict]:
    """The rows of a collected file, each with its settings; none where there is no file."""
    if not file.is_file():
        return []
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [stored["settings"][row["settings"]] | row for row in stored["rows"]]
