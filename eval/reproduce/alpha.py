"""Tables of the study `infinigen`: its alpha and ratio by models, with answers, bytes and tokens fetched."""

from __future__ import annotations

from ..report import paper
from . import tables

BUDGET, PAPERS = 0.2, "infinigen:alpha=4,ratio=0.3"
HALVES = slice(None, 48), slice(48, None)  # documents that choose a setting, and that confirm it


def settings() -> dict[str, dict[str, dict]]:
    """{model: {method: its row}}, where `halves` are the parts right of the halves, and `fetched` and
    `guessed` the parts of the tokens that a step fetches, in all layers and in one that is guessed.

    `topk` fetches its budget in every layer, and so does a guessed one under alpha=inf.
    """
    by: dict[str, dict[str, dict]] = {}
    for row in tables.study("infinigen"):
        right = [[mark == "1" for mark in row["outcomes"][half]] for half in HALVES]
        told = {"halves": [sum(some) / len(some) for some in right]}
        by.setdefault(row["model"], {})[tables.label(row["method"])] = row | told
    for mine in by.values():
        fetched = lambda row, mine=mine: BUDGET * row["moved_bytes"] / mine["topk"]["moved_bytes"]
        most = fetched(mine["infinigen:alpha=inf,ratio=1"])
        for row in mine.values():
            row["fetched"] = fetched(row)
            row["guessed"] = 1 - (1 - row["fetched"]) * (1 - BUDGET) / (1 - most)
    return by


def by_models(which: str) -> str:
    """Settings by models. right: per cent of all documents, and of the halves; bytes: on the device, of what
    `full` holds / tokens fetched in a guessed layer / in all layers."""
    found, cells = settings(), []
    for model, mine in found.items():
        for method, row in mine.items():
            parts = row["device_bytes_of_full"], row["guessed"], row["fetched"]
            text = " / ".join(f"{100 * part:.0f} %" for part in parts)
            if which == "right":
                text = f"{tables.percent(row)} ({', '.join(f'{100 * half:.1f}' for half in row['halves'])})"
            if which == "right" or method.startswith("infinigen"):
                cells.append((f"`{method}`", model, text))
    rows = tables.study("infinigen")
    note = f"{tables.models_of(rows)}; recall, {rows[0]['n']} documents, question inside; "
    note += f"* differs from `full` ({paper.test(rows)}); {tables.made(rows)}"
    return tables.markdown(["method"], tables.grid(cells, found), note)


def chosen() -> str:
    """The setting that is best on the first half, of equal ones the one with the fewest bytes, and what it,
    `topk`, `full` and the paper's setting answer of the other half."""
    body = []
    for model, mine in settings().items():
        tried = [method for method in mine if method.startswith("infinigen")]
        best = max(tried, key=lambda one: (mine[one]["halves"][0], -mine[one]["device_bytes_of_full"]))
        other = [f"{100 * mine[one]['halves'][1]:.1f}" for one in (best, "topk", "full", PAPERS)]
        body.append([model, f"`{best}`", *other])
    head = ["", "chosen on the first half", "second half", "`topk`", "`full`", "the paper's pair for OPT"]
    return tables.markdown(head, body)
