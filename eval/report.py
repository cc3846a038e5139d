"""The report: tables in the terminal, plots, and one page that stands by itself.

Everything comes from the stored cells: `python -m eval report --out DIR` makes it again at any time.
"""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
from rich import box
from rich.console import Console
from rich.table import Table

from . import plots
from .accuracy import DEFINITIONS
from .agreement import DECODED, PROMPT
from .machine import HERE
from .results import Store
from .speed import BASELINES
from .tables import Board, boards, headline, is_share, size

RUN = "run.json"  # the command that made the folder


def write(store: Store, console: Console | None = None) -> list[Path]:
    """Write summary.json, speed.json, the plots and report.html; print the tables. Returns the paths."""
    store.write_tables()
    found = boards(list(store.records()))
    figures = [figure for board in found for figure in draw(board, store.out, len(found) > 1)]
    page = store.out / "report.html"
    page.write_text(render(found, figures, store), encoding="utf-8")
    console = console or Console(highlight=False)
    for board in found:
        print_tables(board, console)
    console.print(f"report: {page}", soft_wrap=True)
    return [page, *(figure["path"] for figure in figures)]


def print_tables(board: Board, console: Console) -> None:
    """The headline, accuracy, and what it costs; each table fits 80 columns with the default tasks."""
    console.print(f"\n{board.model}: {headline(board)}\n", style="bold")
    if board.tasks:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("method", no_wrap=True)
        for task in board.tasks:
            label = board.metric[task]["metric"].split(",")[0]
            label = {"exact_match": "exact", "word_perplexity": "ppl"}.get(label, label)
            table.add_column(f"{task}\n{label}".replace("_em\n", "\n"), justify="right", no_wrap=True)
        for method in board.methods:
            if method in board.scored:
                table.add_row(method, *(_mark(board, method, task) for task in board.tasks))
        console.print(table)
        console.print("Per cent right, or perplexity. ▲ best, ▼ worst, * differs from full (2 stderr).\n")
    if board.bytes or board.speed or board.agreement:
        console.print(_costs(board))
        console.print("Bytes: per cent of what full holds. Time: one row, median.")


def _mark(board: Board, method: str, task: str) -> str:
    entry = board.entries.get((method, task))
    if entry is None:
        return "–  "
    sign = "▲" if entry.best else "▼" if entry.worst else " "
    style = "bold" if entry.best else "dim" if entry.worst else ""
    text = f"{entry.text}{'*' if entry.differs else ' '}{sign}"
    return f"[{style}]{text}[/]" if style else text


def _costs(board: Board) -> Table:
    contexts = list(dict.fromkeys(board.contexts[:1] + board.contexts[-1:]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    heads = ["device\nheld", "host\nheld", "moved\n/step"] if board.bytes else []
    heads += ["top-1\nagree", "KL\nnats"] if board.agreement else []
    heads += [f"ms/tok\n@{context}" for context in contexts]
    heads += ["read\nGB/s"] if contexts else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for method in board.methods:
        cells = []
        if board.bytes:
            shares = board.bytes.get(method)
            names = ("device_bytes", "host_bytes", "moved_bytes")
            cells += [f"{100 * shares[name]:.1f}" if shares else "–" for name in names]
        if board.agreement:
            row = board.agreement.get(method)
            top1, kl = (row["top1"]["value"], row["kl"]["value"]) if row else (None, None)
            cells += [f"{100 * top1:.2f}", f"{kl:.4f}"] if row else ["–", "–"]
        for context in contexts:
            row = board.timing(method, context)
            cells.append(f"{row['decode_ms']:.2f}" if row else "–")
        if contexts:
            row = board.timing(method, contexts[-1])
            cells.append(f"{row['read_gbps']:.1f}" if row else "–")
        table.add_row(method, *cells)
    return table


def draw(board: Board, out: Path, several: bool) -> list[dict]:
    """Draw a board's figures; returns [{path, svg, title, about, model}]."""
    made, suffix = [], f"-{Path(board.model).name}" if several and not board.tasks else ""

    def add(name: str, title: str, about: str, make) -> None:
        path = out / f"{name}{suffix}"
        svg = plots.for_page(plots.draw(make, path), f"{name}{suffix}", title)
        made.append(
            {
                "path": path.with_suffix(".svg"),
                "svg": svg,
                "title": title,
                "about": about,
                "model": board.model,
            }
        )

    points = [
        {"method": m, "accuracy": value, "stderr": error, **board.bytes[m]}
        for m, (value, error) in board.mean.items()
        if m in board.bytes
    ]
    if points:
        held = [p | {"x": p["device_bytes"], "total": p["device_bytes"] + p["host_bytes"]} for p in points]
        add(
            "accuracy-held",
            "Accuracy against bytes held",
            "Up and left is better. The marker stands at the bytes on the device; a dotted line leads to "
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


def render(found: list[Board], figures: list[dict], store: Store) -> str:
    """The page, as text."""
    import kvlab

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters["size"] = size
    environment.filters["small"] = small
    summaries = {name: preset.summary for name, preset in kvlab.METHODS.items()} | BASELINES
    return environment.get_template("report.html.j2").render(
        boards=found,
        figures=figures,
        headline=headline,
        is_share=is_share,
        idea=lambda method: summaries.get(method.partition(":")[0], ""),
        definitions=DEFINITIONS,
        prompt=PROMPT,
        decoded=DECODED,
        stands_on=[(board, _stands_on(board)) for board in found],
        command=_command(store),
    )


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
        for name in ("dtype", "limit", "num_fewshot"):
            note(name.replace("_", " "), cell["config"].get(name))
    return [(what, "; ".join(values)) for what, values in seen.items()]
