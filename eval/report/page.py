"""The report as a self-contained page with its plots. Its layout: `report.html.j2`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2

from kvlab.finding import METHODS, PROFILED
from kvlab.spec import name_of

from ..accuracy.agreement import DECODED, PROMPT
from ..accuracy.batching import PREFILLED, TAIL
from ..accuracy.protocols import EVICT, PROTOCOLS
from ..core.results import RUN, Store
from ..speed.baselines import BASELINES
from . import plots
from .budgets import curves, drawable
from .significance import ABOUT, matrix
from .tables import COLUMNS, HALF, Board, headline, is_share, share, sides, together, united

DEFINITIONS = {
    **{f"protocol {name}": text for name, text in PROTOCOLS.items()},
    **{f"eviction {name}": text for name, text in EVICT.items()},
    "log-likelihood": f"contexts are prefilled once and compressed; the last {TAIL} context token and "
    "then the continuation go through the cache token by token (tail = 1), forked to the choices",
    "rolling perplexity": f"windows as lm-eval makes them; the first {PREFILLED:.0%} of each window are "
    "prefilled and scored from the prefill, the rest is decoded through the cache, so a method "
    "shows in those tokens only",
    "recompute": "stores nothing, so it is scored in one pass; the bytes it holds are 0",
    "bytes": "bytes allocated by the cache per sequence, averaged over all decode steps of the task",
}


def draw(board: Board, out: Path, first: Board) -> list[dict]:
    """Draw a board's plots; returns [{path, svg, title, about, board, make}]. first: the report's first
    board, whose files have the plain names."""
    made, names = [], [(Path(one.model).name, one.setting, one.protocol) for one in (board, first)]
    parts = [mine for mine, its in zip(*names, strict=True) if mine != its]
    suffix = "".join(f"-{re.sub(r'protocol |eviction |[^A-Za-z0-9_]+', '-', one)}" for one in parts)
    suffix = re.sub("-+", "-", suffix)
    side = f" {board.protocol[:1].upper()}{board.protocol[1:]}." if board.protocol else ""

    def add(name: str, title: str, about: str, make) -> None:
        path = out / f"{name}{suffix}"
        svg = plots.for_page(plots.draw(make, path), f"{name}{suffix}", title)
        made.append(
            {
                "path": path.with_suffix(".svg"),
                "svg": svg,
                "title": title,
                "about": about + side,
                "board": board,
                "make": make,
            }
        )

    points = [
        {"method": m, "accuracy": value, "stderr": error, **board.bytes[m]}
        for m, (value, error) in board.mean.items()
        if m in board.bytes
    ]
    found = drawable(board.rows)
    if found:  # many points, which lines from budget to budget tell apart
        add(
            "budgets",
            "Accuracy against bytes, budget by budget",
            "A line joins the budgets of one method; bars are standard errors; the grey step is the front: "
            "what no method here beats in bytes held; dotted: guessing.",
            lambda: curves(found),
        )
    elif points:
        held = [p | {"x": p["device_bytes"], "total": p["device_bytes"] + p["host_bytes"]} for p in points]
        add(
            "accuracy-held",
            "Accuracy against bytes held",
            "Up and left is better. The marker shows the bytes on the device; a dotted line leads to "
            "device and host together.",
            lambda: plots.against_bytes(held, "bytes held"),
        )
        moved = [p | {"x": p["moved_bytes"]} for p in points]
        add(
            "accuracy-moved",
            "Accuracy against bytes moved per step",
            "What crosses the link between host and device for one token. Methods that live on the "
            "device move nothing.",
            lambda: plots.against_bytes(moved, "bytes moved per step"),
        )
    if board.speed:
        add(
            "ms-context",
            "Time per token against context",
            "Decode steps of one row; bars reach from the fastest to the slowest repeat. Grey: "
            "transformers' own caches.",
            lambda: plots.against_context(board.speed),
        )
    return made


def templates() -> jinja2.Environment:
    """What pages are made of."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters |= {"share": share, "small": small}
    return made


def render(found: list[Board], figures: list[dict], store: Store, answers: tuple | None = None) -> str:
    """The page, as text. answers: (its path, how many documents it begins with) of the page of documents."""
    named = METHODS | PROFILED
    summaries = {name: method.summary for name, method in named.items()} | BASELINES
    return (
        templates()
        .get_template("report.html.j2")
        .render(
            groups=[(group, sides(group)) for group in together(found)],
            united=united,
            answers=answers,
            matrix=matrix,
            how_to_read=ABOUT,
            columns=COLUMNS,
            baselines=BASELINES,
            figures=figures,
            headline=headline,
            is_share=is_share,
            half=HALF,
            idea=lambda method: summaries.get(name_of(method), ""),
            definitions=definitions(found),
            prompt=PROMPT,
            decoded=DECODED,
            stands_on=[(board, _stands_on(board)) for board in found],
            command=_command(store),
        )
    )


def definitions(found: list[Board]) -> dict[str, str]:
    """The definitions for the page, without protocols that it does not use."""
    named = " ".join(board.protocol for board in found)
    return {
        word: text
        for word, text in DEFINITIONS.items()
        if word in named or not word.startswith(("protocol ", "eviction "))
    }


def small(value: float) -> str:
    """A number that may be tiny: 0.02271, 6.1e-05, 0."""
    return "0" if value == 0 else f"{value:.4f}" if value >= 0.001 else f"{value:.1e}"


def _command(store: Store) -> str | None:
    try:
        return json.loads((store.out / RUN).read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError):
        return None


def _stands_on(board: Board) -> list[tuple[str, str]]:
    """(what, values) of the cells' machines, versions, commits and settings; several when they differ."""
    seen: dict[str, list[str]] = {}

    def note(what: str, value) -> None:
        if value is not None and str(value) not in seen.setdefault(what, []):
            seen[what].append(str(value))

    for cell in board.cells:
        machine = cell["machine"]
        note("machine", f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB RAM")
        note("device", machine["device"])
        note("threads per process", machine["threads"])
        for name, version in cell["versions"].items():
            note(name, version)
        note("commit", cell.get("commit"))
        for name in ("protocol", "evict", "context_until", "batch_size", "dtype", "limit"):
            note(name.replace("_", " "), cell["config"].get(name))
        note("shots", cell.get("shots"))
    return [(what, "; ".join(values)) for what, values in seen.items()]
