"""Tables of the study `infinigen`: alpha and ratio by models, with their answers, tokens held and fetched."""

from __future__ import annotations

from ..report import paper
from . import tables

BUDGET = 0.2
PAPER = "infinigen:alpha=4,ratio=0.3"
HALVES = (slice(None, 48), slice(48, None))  # documents that choose, documents that confirm


def shares(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """{(model, method): row} with `halves`, the part right of either half of the documents, and the parts of
    the tokens that a step fetches: `fetched` over all layers, `guessed` in a layer that is guessed.

    `topk` fetches a fifth in every layer, rounded down; a guessed one does, too, under alpha=inf.
    """
    by = {(row["model"], tables.label(row["method"])): dict(row) for row in rows}
    part = lambda model, name: BUDGET * by[model, name]["moved_bytes"] / by[model, "topk"]["moved_bytes"]
    for (model, method), row in by.items():
        right = [row["outcomes"][half] for half in HALVES]
        row["halves"] = [some.count("1") / max(1, len(some)) for some in right]
        row["fetched"] = part(model, method)
        most = part(model, "infinigen:alpha=inf,ratio=1")
        guesses = method.startswith("infinigen")
        row["guessed"] = 1 - (1 - row["fetched"]) * (1 - BUDGET) / (1 - most) if guesses else row["fetched"]
    return by


def table(which: str) -> str:
    """Settings by models. which: "right", per cent of all documents (and of either half); "bytes", those on
    the device beside those of `full` / tokens fetched of a guessed layer / of all layers."""
    rows = tables.study("infinigen")
    if not rows:
        return tables.not_made("make reproduce")
    cells = []
    for (model, method), row in shares(rows).items():
        if which == "right":
            first, second = (f"{100 * half:.1f}" for half in row["halves"])
            cells.append((f"`{method}`", model, f"{tables.percent(row)} ({first}, {second})"))
        elif method.startswith("infinigen"):
            parts = (row["device_bytes_of_full"], row["guessed"], row["fetched"])
            cells.append((f"`{method}`", model, " / ".join(f"{100 * part:.0f} %" for part in parts)))
    by_model = {row["model"]: row for row in rows}
    said = [tables.models_of(rows), f"recall, {rows[0]['n']} documents, question inside"]
    said += [f"full does not beat guessing on {m}" for m, row in by_model.items() if not row["compared"]]
    note = "; ".join([*said, f"* differs from `full` ({paper.test(rows)})", tables.made(rows[0])])
    return tables.markdown(["method"], tables.grid(cells, by_model), note)


def chosen() -> str:
    """The setting that is best on the first half of the documents, of equal ones the one with the fewest
    bytes, and what it, `topk`, `full` and the paper's setting answer of the other half."""
    found, body = shares(tables.study("infinigen")), []
    for model in dict.fromkeys(model for model, _ in found):
        mine = {method: row for (of, method), row in found.items() if of == model}
        tried = [method for method in mine if method.startswith("infinigen")]
        best = max(tried, key=lambda one: (mine[one]["halves"][0], -mine[one]["device_bytes_of_full"]))
        other = [f"{100 * mine[one]['halves'][1]:.1f}" for one in (best, "topk", "full", PAPER)]
        body.append([model, f"`{best}`", *other])
    head = ["", "chosen on the first half", "second half", "`topk`", "`full`", "the paper's pair"]
    return tables.markdown(head, body) if body else tables.not_made("make reproduce")
