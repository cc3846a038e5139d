"""Tables of documents, made of the collected studies; `documents.py` sets them between marks."""

from __future__ import annotations

import math

import pandas

from ..core import table
from ..core.digests import ROOT
from ..report import contexts
from ..report.perplexity import beyond, bits
from ..report.tables import HALF
from .collect import place, read

PROTOCOLS = ("context-first", "question-inside")
ASKED = ("many-questions", "reuse", "question-inside")  # one context, several questions


def not_made(command: str) -> str:
    """What stands in the place of a table that has no rows."""
    return f"Not made yet: `{command}` makes it."


def label(method: str) -> str:
    """A method as a table names it: its text without the budget, which stands above the table, and without
    the file that is the reader's own."""
    name, _, rest = method.partition(":")
    more = ",".join(part for part in rest.split(",") if part and not part.startswith(("budget=", "profile=")))
    return f"{name}:{more}" if more else name


def study(name: str) -> list[dict]:
    """A study's collected rows; none where it has not been collected."""
    return read(ROOT / "docs" / "results" / f"{name}.json")


def grid(cells: list[tuple[str, str, str]], columns) -> pandas.DataFrame:
    """Lines by columns, of (line, column, text): lines in their order, nothing where there is no text."""
    found = pandas.DataFrame(cells, columns=["line", "column", "text"])
    lines, found = found["line"].unique(), found.drop_duplicates(["line", "column"], keep="last")
    return found.pivot(index="line", columns="column", values="text").reindex(lines, columns=list(columns))


def markdown(head: list[str], body: list[list[str]] | pandas.DataFrame, note: str = "") -> str:
    if isinstance(body, pandas.DataFrame):
        body = body.fillna("–")
        head, body = [*head, *body.columns], [[name, *line] for name, *line in body.itertuples()]
    return table.markdown(head, body, note)


def made(row: dict) -> str:
    """Where a row was made, and with what."""
    return f"{row['machine']}, torch {row['torch']}, code {row['code_digest']}."


Scores = tuple[pandas.DataFrame, dict[tuple, dict]]


def scores(rows: list[dict], by: tuple[str, ...], keys, title: str) -> Scores:
    """Methods by columns, one for each of the `keys` (values of the fields `by`) that `full` was asked under,
    and {key: the row of `full`}. title: of a column, of its key's values."""
    full = {place(row, by): row for row in rows if row["method"] == "full"}
    there = {key: full[key] for key in keys if key in full}
    at = {key: title.format(*key) for key in there}
    cells = [
        (f"`{label(row['method'])}`", at[key], percent(row)) for row in rows if (key := place(row, by)) in at
    ]
    return grid(cells, at.values()), there


def guessing(there: dict[tuple, dict]) -> list[str]:
    return [f"{100 * row['chance']:.1f}" for row in there.values()]


def accuracy(name: str, budget: str = "0.2", *tasks: str) -> str:
    """Methods by tasks under both protocols at one budget, as `percent` says them, and their bytes."""
    rows = [row for row in study(name) if row["budget"] in (None, float(budget))]
    if not rows:
        return not_made("make reproduce")
    tasks = tasks or tuple(dict.fromkeys(row["task"] for row in rows))
    by = ("task", "protocol")
    found, there = scores(rows, by, [(t, p) for p in PROTOCOLS for t in tasks], "{}, {}")
    shown = [row for row in rows if place(row, by) in there]
    protocols = list(dict.fromkeys(p for _, p in there))
    each: dict[tuple, list[dict]] = {}
    for row in shown:
        each.setdefault((f"`{label(row['method'])}`", row["protocol"]), []).append(row)
    held = [[sizes(each.get((method, p), [])) for p in protocols] for method in found.index]
    for index, head in enumerate(("bytes held", "moved per step")):
        texts = [one_by_one([one[index] for one in some]) for some in held]
        found[f"{head}, {' / '.join(protocols)}"] = texts
    floors = [row["floor"] for row in there.values()]
    if any(floor is not None for floor in floors):
        named = ["–" if floor is None else f"{100 * floor:.1f}" for floor in floors]
        found.loc["`full`, 0 shots"] = [*named, "", ""]
    found.loc["guessing"] = [*guessing(there), "", ""]
    return markdown(["method"], found, stands_on(rows, there, shown))


def percent(row: dict | None) -> str:
    """A score ± its standard error; * where it differs from that of `full`; nothing is compared at chance.
    ! where a rule chose more slots than the method's score."""
    if row is None:
        return "–"
    mark = "*" if row["differs"] else ""
    return f"{100 * row['value']:.1f}{mark} ± {100 * (row['stderr'] or 0):.1f}" + " !" * by_rule(row)


def by_rule(row: dict) -> bool:
    """Whether a rule, such as a window, held most of what stayed of the prompt."""
    return row["scored"] is not None and row["scored"] < HALF


def one_by_one(texts: list[str]) -> str:
    """What protocols say, one beside the other, or once where they say the same."""
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def sizes(rows: list[dict]) -> list[str]:
    """Bytes held (device, and host where there is any) and moved, as shares of what `full` holds: of rows of
    one protocol, means over tasks."""
    if not rows:
        return ["–", "–"]
    mean = lambda name: sum(row[f"{name}_of_full"] for row in rows) / len(rows)
    held = f"{100 * mean('device_bytes'):.0f} %"
    host = mean("host_bytes")
    return [
        held + (f" + {100 * host:.0f} % on the host" if host else ""),
        f"{100 * mean('moved_bytes'):.0f} %",
    ]


def stands_on(rows: list[dict], there: dict[tuple, dict], shown: list[dict]) -> str:
    """One paragraph: what these numbers are of."""
    one = rows[0]
    counts = dict.fromkeys((task, row["n"]) for (task, _), row in there.items())
    several = len(counts) > len({t for t, _ in counts})  # a task has other documents under another protocol
    counts = dict.fromkeys(
        f"{t} {row['n']}" + (f" ({p})" if several else "") for (t, p), row in there.items()
    )
    every = lambda key: ", ".join(sorted({row[key] for row in rows}))
    model = [f"{one['model']} (digest {every('model_digest')})", one["dtype"], *shots(shown)]
    said = [f"{', '.join(model)}; documents: {', '.join(counts)}"]
    low = sorted({task for (task, _), row in there.items() if not row["compared"]})
    if low:
        said.append(f"full does not beat guessing on {', '.join(low)}, so no method is compared there")
    marks = [f"* differs from `full` ({test(shown)})"]
    if any(map(by_rule, shown)):
        marks.append("! a rule held more slots than the method's score chose")
    said.append("; ".join([*marks, made({key: every(key) for key in ("machine", "torch", "code_digest")})]))
    return ". ".join(said)


def shots(rows: list[dict]) -> list[str]:
    """How many examples stood before an item, where every row knows it."""
    counts = {row.get("shots") for row in rows}
    return [] if None in counts else [" or ".join(map(str, sorted(counts))) + " shots"]


def test(rows: list[dict]) -> str:
    """What a star stands on: McNemar's test, but where a score is a share of what was asked for."""
    shares = dict.fromkeys(row["task"] for row in rows if row["p"] is None)
    besides = f"; {', '.join(shares)}: two standard errors of the paired difference" if shares else ""
    return f"McNemar, p < 0.05{besides}"


def curves(name: str, task: str, protocol: str) -> str:
    """One task under one protocol: methods by budgets, and where the method's own score chose most slots."""
    rows = [row for row in study(name) if row["task"] == task and row["protocol"] == protocol]
    if not rows:
        return not_made("make reproduce")
    budgets = sorted({row["budget"] for row in rows if row["budget"] is not None})
    cells = [
        (f"`{row['curve']}`", f"{100 * row['budget']:g} %", percent(row)) for row in rows if row["budget"]
    ]
    full = next((row for row in rows if row["method"] == "full"), None)
    return markdown([f"`full`: {percent(full)}"], grid(cells, [f"{100 * budget:g} %" for budget in budgets]))


def beside(budget: str, *tasks: str) -> str:
    """The workshop models beside SmolLM2 at one budget, the methods that all have by tasks and protocols."""
    named = {"workshop": study("toy"), "workshop-opt": study("opt"), "SmolLM2": study("passages")}
    rows = [
        row | {"model": model}
        for model, some in named.items()
        for row in some
        if row["budget"] in (None, float(budget))
    ]
    keys = [(t, p, m) for t in tasks for p in PROTOCOLS for m in named]
    found, there = scores(rows, ("task", "protocol", "model"), keys, "{}, {}: {}")
    if not there:
        return not_made("make reproduce")
    found = found.dropna()
    found.loc["guessing"] = guessing(there)
    return markdown(["method"], found)


def perplexity(name: str = "perplexity") -> str:
    """Models by methods: perplexity, and what a token costs beyond `full` in the last quarter of a chunk."""
    rows = study(name)
    if not rows:
        return not_made("make reproduce")
    full = {row["model"]: row for row in rows if row["method"] == "full"}
    cells = []
    for row in rows:
        method, model, base = f"`{label(row['method'])}`", row["model"], full[row["model"]]
        late = f"{end(row) - end(base):+.3f} ± {beyond(row, base):.3f}"
        cells += [(method, model, f"{row['perplexity']:.4g}"), (method, f"{model}{LATE}", late)]
    found = grid(cells, [title for model in full for title in (model, f"{model}{LATE}")])
    return markdown(["method"], found, f"{models_of(rows)}; {chunks(rows[0])} are decoded; {made(rows[0])}")


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


def formats(name: str = "formats") -> str:
    """Formats by the bits that they take: perplexity, and what a token costs beyond `full`."""
    rows = study(name)
    if not rows:
        return not_made("make reproduce")
    full = next(row for row in rows if row["method"] == "full")
    body = []
    for row in sorted(rows, key=lambda one: -bits(one, full)):
        lost = math.log(row["perplexity"] / full["perplexity"])
        more = "" if row is full else f"{lost:+.3f} ± {beyond(row, full):.3f}"
        body.append([f"`{row['method']}`", f"{bits(row, full):.3g}", f"{row['perplexity']:.4g}", more])
    head = ["format", "bits a number", "perplexity", "nats beyond full"]
    row = rows[-1]
    return markdown(head, body, f"{models_of([row])}; {chunks(row)} are decoded; {made(row)}")


def costs(name: str, protocol: str, model: str | None = None) -> str:
    """What a context costs that is asked several questions, under one protocol: methods by bytes held,
    contexts, tokens prefilled and seconds; dashes where a row was made before contexts were counted."""
    rows = [row for row in study(name) if row["protocol"] == protocol and model in (None, row["model"])]
    if not rows:
        return not_made("make reproduce")
    body = [
        [row["model"], f"`{label(row['method'])}`", sizes([row])[0], *contexts.texts([row])] for row in rows
    ]
    last = f"{models_of(rows)}, {rows[0]['task']}; {made(rows[0])}"
    return markdown(["model", "method", "bytes held", *contexts.HEADS], body, last)


def reuse(name: str = "reuse") -> str:
    """Several questions on a context: methods by models and by what the compression knew, per cent right."""
    rows = study(name)
    if not rows:
        return not_made("make reproduce")
    by_model = {row["model"]: row for row in rows}
    keys = [(model, protocol) for model in by_model for protocol in ASKED]
    found, there = scores(rows, ("model", "protocol"), keys, "{}, {}")
    found.loc["guessing"] = guessing(there)
    models = "; ".join(f"{models_of([row])}, {row['n']} questions" for row in by_model.values())
    asked = ", ".join([*shots(rows), rows[0]["task"]])
    star = "* differs from `full` (McNemar, p < 0.05)"
    return markdown(["method"], found, f"{models}; {asked}; {star}; {made(rows[0])}")


def lengths(name: str = "beyond", band: str = "1024") -> str:
    """Methods by bands of so many positions: perplexity within each, and the bytes held beside those of
    `full`, mean over steps."""
    rows, wide = study(name), int(band)
    if not rows:
        return not_made("make reproduce")
    starts = sorted({at["position"] // wide * wide for at in rows[0]["rows"]})
    full = next(row for row in rows if row["method"] == "full")
    body = []
    for row in rows:
        line = [f"`{row['method']}`"]
        for start in starts:
            mine = [at for at in row["rows"] if start <= at["position"] < start + wide]
            tokens = sum(at["tokens"] for at in mine)
            line.append(f"{math.exp(sum(at['loss'] * at['tokens'] for at in mine) / tokens):.4g}")
        share = row["bytes"]["device_bytes"] / full["bytes"]["device_bytes"]
        body.append([*line, f"{100 * share:.0f} %"])
    of = f"{len(full['values'])} chunks of {full['chunk']} tokens, of which the first {full['prompt']}"
    head = ["method", *(f"{start:,} to {start + wide - 1:,}" for start in starts), "bytes held"]
    return markdown(head, body, f"{models_of([full])}; {of} are prefilled; {made(full)}")
