"""The report as a self-contained page with its plots. Its layout: `report.html.j2`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jinja2

from kvlab.finding import METHODS, PROFILED
from kvlab.parameters import check_file
from kvlab.spec import name_of

from ..accuracy.agreement import DECODED, PROMPT
from ..accuracy.batching import PREFILLED
from ..accuracy.protocols import EVICT, PROTOCOLS
from ..accuracy.taskset import AGREEMENT
from ..core.results import RUN, Store
from ..speed.baselines import BASELINES
from . import plots
from .budgets import curves, drawable
from .paper import test
from .significance import ABOUT, matrix
from .tables import COLUMNS, HALF, Board, headline, is_share, share, sides, together, united, units

KINDS = {  # of tasks, by lm-eval's output types: how they are scored
    "log-likelihood": (
        ("multiple_choice", "loglikelihood"),
        "a context is prefilled once and compressed; its last token and then the continuation go through the "
        "cache token by token, for each choice in a fork of its own",
    ),
    "rolling perplexity": (
        ("loglikelihood_rolling",),
        f"windows as lm-eval makes them; the first {100 * PREFILLED:.0f} % of each window are prefilled and "
        "scored from the prefill; the rest is decoded through the cache, and only there can a method lose",
    ),
    "generation": (
        ("generate_until",),
        "a prompt is prefilled and compressed; its last token and every token that the model writes go "
        "through the cache one by one",
    ),
}
DEFINITIONS = {  # what else a page may have
    "recompute": "stores nothing, so it is scored in one pass; the bytes it holds are 0",
    "bytes": "bytes allocated by the cache per sequence, averaged over all decode steps of the task",
    "by score": "of the slots that stayed when a prompt was compressed, the share that the method's score "
    "chose, on the task where that is least; first tokens, recent windows and the newest token stay by rule. "
    "A ! marks less than half",
    "agreement": f"held-out stories are decoded with their own text as the answer: {DECODED} predictions "
    f"after a prompt of {PROMPT} tokens, each through the cache. Top-1 is the share whose most likely token "
    "is the full cache's; KL is the mean KL(full ‖ method) in nats per token",
    "H2O, InfiniGen": "their papers simulate: one full forward pass with masked attention. Here tokens are "
    "really evicted, or really fetched, at every decode step, so numbers from the papers and from this page "
    "are not the same measurement",
    "standard errors": "over documents, of agreement over stories: lm-eval's own formula where it has one, "
    "else leave-one-out (jackknife)",
}


def draw(board: Board, out: Path, first: Board) -> list[dict]:
    """Draw a board's plots; returns [{path, svg, title, about, board, make}]. first: the report's first
    board, whose files have the plain names."""
    made, names = [], [(Path(one.model).name, one.setting, one.protocol) for one in (board, first)]
    parts = [mine for mine, its in zip(*names, strict=True) if mine != its]
    suffix = "".join(f"-{re.sub(r'protocol |eviction |[^A-Za-z0-9_]+', '-', one)}" for one in parts)
    suffix = re.sub("-+", "-", suffix)
    side = f" {board.protocol[:1].upper()}{board.protocol[1:]}." if board.protocol else ""

    def add(name: str, title: str, about: str, make, side: str = side) -> None:
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

    points, found = board.points, drawable(board.rows)
    if found:  # many points, which lines from budget to budget tell apart
        add(
            "budgets",
            "Accuracy against bytes, budget by budget",
            "A line joins the budgets of one method; bars are standard errors; the grey step is the front: "
            "what no method here beats in bytes held; dotted: guessing.",
            lambda: curves(found),
        )
    elif points:
        add(
            "accuracy-held",
            "Accuracy against bytes held",
            "Up and left is better. The marker shows the bytes on the device; a dotted line leads to "
            "device and host together.",
            lambda: plots.against_bytes(points, "bytes held"),
        )
        moved = [p | {"x": board.bytes[p["method"]]["moved_bytes"], "total": None} for p in points]
        if any(p["x"] for p in moved):
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
            side="",
        )
    return made


def templates() -> jinja2.Environment:
    """What pages are made of."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    made.filters["share"] = share
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
            units=units,
            test=test,
            agreement=AGREEMENT,
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
            stands_on=[(board, _stands_on(board)) for board in found],
            command=_command(store),
        )
    )


def definitions(found: list[Board]) -> dict[str, str]:
    """What the page explains: what these boards have, and nothing else."""
    named = " ".join(board.protocol for board in found)
    told = {
        f"{what} {name}": text
        for what, known in (("protocol", PROTOCOLS), ("eviction", EVICT))
        for name, text in known.items()
        if f"{what} {name}" in named
    }
    methods = {name_of(method) for board in found for method in board.methods}
    kinds = {c.get("output_type") for board in found for c in board.cells if c["task"] in board.tasks}
    told |= {
        word: text for word, (types, text) in KINDS.items() if kinds & {None, *types}
    }  # None: older cells
    there = {
        "recompute": "recompute" in methods,
        "bytes": any(board.bytes for board in found),
        "by score": any(board.scored_share for board in found),
        "agreement": any(board.agreement for board in found),
        "H2O, InfiniGen": bool(methods & {"h2o", "infinigen"}),
        "standard errors": any(board.rows for board in found),
    }
    return told | {word: text for word, text in DEFINITIONS.items() if there[word]}


def _command(store: Store) -> str | None:
    try:
        check_file(store.out / RUN)
        return json.loads((store.out / RUN).read_text(encoding="utf-8"))["command"]
    except (OSError, ValueError, KeyError):
        return None


def _stands_on(board: Board) -> list[tuple[str, str]]:
    """(what, values) of the cells' machines, versions, commits and settings; several when they differ."""
    seen: dict[str, dict[str, None]] = {}
    settings = ("protocol", "evict", "context_until", "batch_size", "dtype", "limit")
    for cell in board.cells:
        machine = cell["machine"]
        told = {"machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['ram_gib']} GiB RAM"}
        told |= {"device": machine["device"], "threads per process": machine["threads"]}
        told |= cell["versions"] | {"commit": cell.get("commit")}
        told |= {name.replace("_", " "): cell["config"].get(name) for name in settings}
        for what, value in (told | {"shots": cell.get("shots")}).items():
            if value is not None:
                seen.setdefault(what, {})[str(value)] = None
    return [(what, "; ".join(values)) for what, values in seen.items()]
