"""Tables of the study `infinigen`: alpha and ratio by models, what they answer, hold and fetch."""

from __future__ import annotations

from . import tables

HALVES = (slice(None, 48), slice(48, None))  # documents that choose, documents that confirm


def shares(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """{(model, method): row} with `halves`, the part right of either half of the documents, and the parts of
    the tokens that a step fetches: `fetched` over all layers, `guessed` in a layer that is guessed.

    The parts are of what `offload` fetches. Under alpha=inf a guessed layer fetches as much as `topk`.
    """
    by = {(row["model"], row["method"].replace(",budget=0.2", "")): dict(row) for row in rows}
    part = lambda model, name: by[model, name]["moved_bytes"] / by[model, "offload"]["moved_bytes"]
    for (model, method), row in by.items():
        right = [row["outcomes"][half] for half in HALVES]
        row["halves"] = [some.count("1") / max(1, len(some)) for some in right]
        row["fetched"] = part(model, method)
        most, top = part(model, "infinigen:alpha=inf,ratio=1"), part(model, "topk:budget=0.2")
        row["guessed"] = 1 - (1 - row["fetched"]) * (1 - top) / (1 - most)
    return by


def table(which: str) -> str:
    """Settings by models. which: "right", per cent of all documents and of either half; "bytes", those on the
    device and those fetched a step, of a guessed layer and of all, in per cent of what `full` holds."""
    rows = tables.study("infinigen")
    if not rows:
        return tables.not_made("make reproduce")
    cells = []
    for (model, method), row in shares(rows).items():
        guesses = method.startswith("infinigen")
        if which == "right":
            first, second = (f"{100 * half:.1f}" for half in row["halves"])
            cells.append((f"`{method}`", model, f"{tables.percent(row)} ({first}, {second})"))
        elif guesses or method.startswith("topk"):
            held = f"{100 * row['device_bytes_of_full']:.0f}"
            fetched = f"{100 * row['guessed']:.0f}, {100 * row['fetched']:.0f}"
            cells.append((f"`{method}`", model, f"{held}; {fetched}"))
    by_model = {row["model"]: row for row in rows}
    said = [tables.models_of(rows), f"recall, {rows[0]['n']} documents, question inside"]
    said += [f"full does not beat guessing on {m}" for m, row in by_model.items() if not row["compared"]]
    note = "; ".join([*said, f"* differs from `full` ({tables.test(rows)})", tables.made(rows[0])])
    return tables.markdown(["method"], tables.grid(cells, by_model), note)
