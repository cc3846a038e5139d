"""Tables of documents, made of the collected studies; `documents.py` sets them between marks."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable

from ..core.digests import ROOT
from ..report import contexts, paper
from ..report.paper import grid, guessing, label, made, markdown, percent, scores, shots, sizes
from ..report.perplexity import bits
from ..report.statistics import paired
from .collect import read


class NotMade(ValueError):
    """A study that has not been collected."""


def collected(name: str) -> list[dict]:
    """A study's collected rows; none where it has not been collected."""
    return read(ROOT / "docs" / "results" / f"{name}.json")


def study(name: str, wanted: Callable[[dict], bool] = bool) -> list[dict]:
    """A study's collected rows that are wanted. Raises NotMade where there are none."""
    if not (rows := [*filter(wanted, collected(name))]):
        raise NotMade(f"Not made yet: `make reproduce` makes {name}.")
    return rows


def accuracy(name: str, budget: str = "0.2", *tasks: str) -> str:
    """Methods by tasks under both protocols at one budget, as `percent` says them, and their bytes."""
    rows = study(name, lambda row: row["budget"] in (None, float(budget)))
    return markdown(["method"], *paper.accuracy(rows, tasks))


def curves(name: str, task: str, protocol: str) -> str:
    """One task under one protocol: methods by budgets, and where the method's own score chose most slots."""
    rows = study(name, lambda row: (row["task"], row["protocol"]) == (task, protocol))
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    cells = [
        (f"`{row['curve']}`", f"{100 * row['budget']:g} %", percent(row)) for row in rows if row["budget"]
    ]
    full = next((row for row in rows if row["method"] == "full"), None)
    return markdown([f"`full`: {percent(full)}"], grid(cells, [f"{100 * budget:g} %" for budget in budgets]))


def perplexity(name: str = "perplexity") -> str:
    """Models by methods: perplexity, and what a token costs beyond `full` in the last quarter of a chunk."""
    rows = study(name)
    full = {row["model"]: row for row in rows if row["method"] == "full"}
    cells = []
    for row in rows:
        method, model, base = f"`{label(row['method'])}`", row["model"], full[row["model"]]
        late = f"{end(row) - end(base):+.3f} ± {paired(row['values'], base['values'])[1]:.3f}"
        cells += [(method, model, f"{row['perplexity']:.4g}"), (method, f"{model}{LATE}", late)]
    found = grid(cells, [title for model in full for title in (model, f"{model}{LATE}")])
    return markdown(["method"], found, f"{models_of(rows)}; {chunks(rows[0])} are decoded; {made(rows)}")


LATE = ": nats beyond full, last quarter"


def chunks(row: dict) -> str:
    """The texts that a perplexity is of."""
    count = row.get("limit") or len(row["values"])
    last = row["chunk"] - row["prompt"]
    return f"{count} chunks of {row['chunk']} tokens, of which the last {last}"


def models_of(rows: list[dict]) -> str:
    """Each model of these rows with its digest and the form that its weights ran in: kvlab's own where it was
    not told."""
    by_model = {row["model"]: row for row in rows}
    return "; ".join(
        f"{name} (digest {row['model_digest']}), {row.get('dtype') or 'float32'}"
        for name, row in by_model.items()
    )


def end(row: dict) -> float:
    """Mean loss in the last quarter of the places."""
    last = row["rows"][-max(1, len(row["rows"]) // 4) :]
    return sum(at["loss"] for at in last) / len(last)


def formats(*names: str) -> str:
    """Formats by the bits that they take in the first study that has them, and by models: what a token costs
    beyond `full`, in nats; of `full` the perplexity."""
    cells, width, last = [], {}, []
    for rows in [rows for name in names if (rows := collected(name))] or [study(names[0])]:
        full = next(row for row in rows if row["method"] == "full")
        last.append(full)
        for row in rows:
            lost = math.log(row["perplexity"] / full["perplexity"])
            text = f"{lost:+.3f} ± {paired(row['values'], full['values'])[1]:.3f}"
            text = f"perplexity {row['perplexity']:.4g}" if row["method"] == "full" else text
            width.setdefault(row["method"], bits(row, full))
            cells.append((f"`{row['method']}`", row["model"], text))
    order = sorted(width, key=width.get, reverse=True)
    cells = [(f"`{method}`", "bits a number", f"{width[method]:.3g}") for method in order] + cells
    found = grid(cells, ["bits a number", *(row["model"] for row in last)])
    note = f"{models_of(last)}; {chunks(last[0])} are decoded; {made(last)}"
    return markdown(["format"], found, note)


def costs(name: str, protocol: str, model: str | None = None) -> str:
    """The cost of a context that is asked several questions, under one protocol: for each method the bytes
    held, contexts, tokens prefilled and seconds. Rows made before contexts were counted have dashes."""
    rows = study(name, lambda row: row["protocol"] == protocol and model in (None, row["model"]))
    body = [
        [row["model"], f"`{label(row['method'])}`", sizes([row])[0], *contexts.texts([row])] for row in rows
    ]
    last = f"{models_of(rows)}, {rows[0]['task']}; {made(rows)}"
    return markdown(["model", "method", "bytes held", *contexts.HEADS], body, last)


def crossed(names: str, *by: str) -> str:
    """A row for each method and a column for each combination of values of these fields, formatted by
    `percent`. names: studies joined by +; with several, only methods found in all of them are shown. by:
    fields; FIELD=VALUE keeps rows that have this value, or no value."""
    short = lambda model: re.sub(r"(-instruct)?-q4_k_m\.gguf$", "", model)
    told = [row | {"model": short(row["model"])} for name in names.split("+") for row in study(name)]
    where = dict(one.split("=") for one in by if "=" in one)
    rows = [row for row in told if all(str(row[field]) in (value, "None") for field, value in where.items())]
    if not rows:
        raise NotMade(f"Not made yet: `make reproduce` makes {names}.")
    by = tuple(field for field in by if "=" not in field)
    keys = itertools.product(*(dict.fromkeys(row[field] for row in rows) for field in by))
    found, there = scores(rows, by, keys, ", ".join(["{}"] * len(by)))
    found = found.dropna() if "+" in names else found
    found.loc["guessing"] = guessing(there)
    asked = ", ".join([*shots(rows), *dict.fromkeys(f"{row['task']} {row['n']}" for row in there.values())])
    star = "* differs from `full` (McNemar, p < 0.05)"
    return markdown(["method"], found, f"{models_of(rows)}; {asked}; {star}; {made(rows)}")


def gates(folder: str = "") -> dict[str, dict]:
    """{model: what `kvlab gate --json` stored}, without the planted ones."""
    files = sorted((ROOT / "docs" / "results" / "gate" / folder).glob("*.json"))
    return {file.stem: json.loads(file.read_text("utf-8")) for file in files if file.stem != "planted"}


def gated(found: dict[str, dict], cells: list[tuple[str, str, str]]) -> str:
    """A table of gates, (method, model, text) a cell, and when and where they were made."""
    made = (
        f"{model}: {gate['made']['cpu']}, torch {gate['made']['torch']}, {gate['made']['date']}"
        for model, gate in found.items()
    )
    return markdown(["method"], grid(cells, found), "; ".join(made))


def verdicts(*methods: str) -> str:
    """These formats, or all, by models: verdict, nats, share of most probable tokens that are the same."""
    found, cells = gates(), []
    for model, gate in found.items():
        for line in gate["lines"]:
            if (spent := line["cost"]) is not None and line["method"] in (methods or [line["method"]]):
                told = f"{line['verdict']}: {spent['nats']:.2g} ({100 * spent['agrees']:.0f} %)"
                cells.append((f"`{line['method']}`", model, told))
    return gated(found, cells)


def answered() -> str:
    """Keeps by models: verdict, and right answers context first and with the question inside."""
    found, cells = gates("keeps"), []
    for model, gate in found.items():
        shares = lambda of: " / ".join(f"{100 * share:.0f} %" for share in of.values())
        cells.append(("`full`", model, shares(gate["full"])))
        for line in gate["lines"]:
            cells.append((f"`{line['method']}`", model, f"{line['verdict']}: {shares(line['accuracy'])}"))
    return gated(found, cells)
