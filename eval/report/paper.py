"""Tables for documents and papers, from rows (`records.row`): methods by tasks under all protocols.

The documents' tables (`eval/reproduce/tables.py`) and `report --format` come from here.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas

from ..accuracy.protocols import PROTOCOLS
from ..core.numbers import shown, spread
from .tables import HALF


def label(method: str) -> str:
    """A method as a table names it: its text without the budget, which is above the table, and without the
    user's own file."""
    name, _, rest = method.partition(":")
    more = ",".join(part for part in rest.split(",") if part and not part.startswith(("budget=", "profile=")))
    return f"{name}:{more}" if more else name


def grid(cells: list[tuple[str, str, str]], columns) -> pandas.DataFrame:
    """Lines by columns, of (line, column, text): lines in their order, nothing where there is no text."""
    found = pandas.DataFrame(cells, columns=["line", "column", "text"])
    lines, found = found["line"].unique(), found.drop_duplicates(["line", "column"], keep="last")
    return found.pivot(index="line", columns="column", values="text").reindex(lines, columns=list(columns))


def markdown(head: list[str], body: list[list[str]] | pandas.DataFrame, note: str = "") -> str:
    """A table as Markdown. head: a title for every column, of which the first holds words, the others
    numbers; a frame adds its own. body: lines of texts. note: a line below."""
    if isinstance(body, pandas.DataFrame):
        body = body.fillna("–")
        head, body = [*head, *body.columns], [[name, *line] for name, *line in body.itertuples()]
    rule = ["---", *["--:"] * (len(head) - 1)]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
    return f"{lines}\n\n{note}" if note else lines


def made(rows: list[dict]) -> str:
    """Where rows were made, and with what."""
    return f"{every(rows, 'machine')}, torch {every(rows, 'torch')}, code {every(rows, 'code_digest')}."


def every(rows: list[dict], key: str) -> str:
    """All that rows say there."""
    return ", ".join(sorted({str(row[key]) for row in rows}))


def place(row: dict, names: tuple[str, ...]) -> tuple:
    """A row's place in the table."""
    return tuple(str(row.get(name)) for name in names)


Scores = tuple[pandas.DataFrame, dict[tuple, dict]]


def scores(rows: list[dict], by: tuple[str, ...], keys, title: str, called: Callable = label) -> Scores:
    """Methods by columns, one for each of the `keys` (values of the fields `by`) that `full` was asked under,
    and {key: the row of `full`}. title: of a column, of its key's values."""
    known = [row for row in rows if row["method"] == "full"] or rows[::-1]
    full = {place(row, by): row for row in known}
    there = {key: full[key] for key in keys if key in full}
    at = {key: title.format(*key) for key in there}
    cells = [
        (f"`{called(row['method'])}`", at[key], percent(row)) for row in rows if (key := place(row, by)) in at
    ]
    return grid(cells, at.values()), there


def guessing(there: dict[tuple, dict]) -> list[str]:
    return ["" if row["chance"] is None else f"{100 * row['chance']:.1f}" for row in there.values()]


def accuracy(
    rows: list[dict], tasks: tuple[str, ...] = (), called: Callable = label, against: str = "full"
) -> tuple[pandas.DataFrame, str]:
    """(methods by tasks under every protocol, as `percent` says them, and their bytes; what they are of).
    called: method -> its name in the table."""
    tasks = tasks or tuple(dict.fromkeys(row["task"] for row in rows))
    by = ("task", "protocol")
    order = dict.fromkeys((*PROTOCOLS, *(row["protocol"] for row in rows)))
    found, there = scores(rows, by, [(t, str(p)) for p in order for t in tasks], "{}, {}", called)
    told = [row for row in rows if place(row, by) in there]
    protocols = list(dict.fromkeys(p for _, p in there))
    each: dict[tuple, list[dict]] = {}
    for row in told:
        each.setdefault((f"`{called(row['method'])}`", str(row["protocol"])), []).append(row)
    held = [[sizes(each.get((method, p), [])) for p in protocols] for method in found.index]
    for index, head in enumerate(("bytes held", "moved per step")):
        texts = [one_by_one([one[index] for one in some]) for some in held]
        found[f"{head}, {' / '.join(protocols)}"] = texts
    floors = [row["floor"] for row in there.values()]
    if any(floor is not None for floor in floors):
        named = ["–" if floor is None else f"{100 * floor:.1f}" for floor in floors]
        found.loc["`full`, 0 shots"] = [*named, "", ""]
    if any(row["chance"] is not None for row in there.values()):
        found.loc["guessing"] = [*guessing(there), "", ""]
    return found, stands_on(rows, there, told, against)


def percent(row: dict | None) -> str:
    """A score ± its standard error; * where it differs from that of `full`; nothing is compared at chance.
    ! where a rule chose more slots than the method's score."""
    if row is None:
        return "–"
    mark = "*" if row["differs"] else ""
    return f"{shown(row)}{mark} ± {spread(row)}" + " !" * by_rule(row)


def by_rule(row: dict) -> bool:
    """Whether a rule, such as a window, held most of what stayed of the prompt."""
    return row["scored"] is not None and row["scored"] < HALF


def one_by_one(texts: list[str]) -> str:
    """What protocols say, one beside the other, or once where they say the same."""
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def sizes(rows: list[dict]) -> list[str]:
    """Bytes held (device, and host where there is any) and moved, as shares of what `full` holds: of rows of
    one protocol, means over tasks."""
    if not rows or any(row["device_bytes_of_full"] is None for row in rows):
        return ["–", "–"]
    mean = lambda name: sum(row[f"{name}_of_full"] for row in rows) / len(rows)
    held = f"{100 * mean('device_bytes'):.0f} %"
    host = mean("host_bytes")
    return [
        held + (f" + {100 * host:.0f} % on the host" if host else ""),
        f"{100 * mean('moved_bytes'):.0f} %",
    ]


def stands_on(rows: list[dict], there: dict[tuple, dict], told: list[dict], against: str) -> str:
    """One paragraph: what these numbers are of."""
    one = rows[0]
    counts = dict.fromkeys((task, row["n"]) for (task, _), row in there.items())
    several = len(counts) > len({t for t, _ in counts})  # a task has other documents under another protocol
    counts = dict.fromkeys(
        f"{t} {row['n']}" + (f" ({p})" if several else "") for (t, p), row in there.items()
    )
    model = [f"{one['model']} (digest {every(rows, 'model_digest')})", one["dtype"], *shots(told)]
    said = [f"{', '.join(model)}; documents: {', '.join(counts)}"]
    low = sorted({task for (task, _), row in there.items() if row["compared"] is False})
    if low:
        said.append(f"full does not beat guessing on {', '.join(low)}, so no method is compared there")
    compared = [row for row in told if row["differs"] is not None and row["method"] != against]
    marks = [f"* differs from `{against}` ({test(compared)})"] if compared else []
    if any(map(by_rule, told)):
        marks.append("! a rule held more slots than the method's score chose")
    said.append("; ".join([*marks, made(rows)]))
    return ". ".join(said)


def shots(rows: list[dict]) -> list[str]:
    """How many examples stood before an item, where every row knows it."""
    counts = {row.get("shots") for row in rows}
    return [] if None in counts else [" or ".join(map(str, sorted(counts))) + " shots"]


def test(rows: list[dict]) -> str:
    """The test behind a star: McNemar's, except for scores that are not right or wrong."""
    others = dict.fromkeys(row["task"] for row in rows if row["p"] is None)
    besides = f"{', '.join(others)}: two standard errors of the paired difference" if others else ""
    exact = "McNemar, p < 0.05, each pair by itself" if any(row["p"] is not None for row in rows) else ""
    return "; ".join(filter(None, (exact, besides)))
