"""Studies for the eye: what a file of rows is, and the tables of `attention` and `static-graph`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.table import Table

from ..core.files import write_json
from ..core.show import Verbatim
from ..studies.attention import HEAD_DIM, HEADS

ENGINES = {  # columns of the study static-graph: {title: what is shown of a row}
    "ms/token": lambda r: f"{r['ms']:.2f}",
    "times generate": lambda r: f"{r['ratio']:.2f}",
    "same 200 tokens": lambda r: "yes" if r["equal"] else "no",
    "managing": lambda r: f"{r['manage']:.1%}" if "manage" in r else "",
}
COLUMNS = {
    "engines-512": ENGINES,
    "managing": {
        "step, ms": lambda r: f"{r['step_ms']:.1f}",
        "managing, ms": lambda r: f"{r['manage_ms']:.3f}",
        "share": lambda r: f"{r['share']:.2%}",
        "copied per step": lambda r: f"{r['copied_bytes']:,} B",
        "reserved": lambda r: f"{r['reserved_bytes'] / 1e6:.1f} MB",
    },
    "prompt": {"ms": lambda r: f"{r:.0f}"},
    "memory": {
        "formula": lambda r: f"{r['predicted'] / 1e6:.1f} MB",
        "process grew by": lambda r: f"{r['grown'] / 1e6:.1f} MB",
        "ratio": lambda r: f"{r['grown'] / r['predicted']:.3f}",
    },
    "drift": {
        f"step {step:,}": lambda r, step=step: f"{r[str(step)]:.2%}" for step in (1, 10, 100, 300, 700, 1500)
    },
    "requests": {
        "reserved": lambda r: f"{r['reserved'] / 1e6:.1f} MB",
        "beyond one place per token": lambda r: f"{1 - r['used'] / r['reserved']:.1%}",
    },
    "engines-2048": ENGINES,
}


def write_rows(cells: dict[str, dict], out: Path, name: str, show, line: Callable[[dict], str]) -> list[dict]:
    """Write OUT/NAME.json, the rows of {experiment: cell}, and OUT/NAME-machine.json; show every row as a
    line. Returns the rows."""
    rows = [row for cell in cells.values() for row in cell["rows"]]
    write_json(out / f"{name}.json", rows)
    for experiment, cell in cells.items():
        write_json(out / f"{name}-machine.json", cell["machine"])
        show.line(f"{experiment}:")
        for text in (*map(line, cell["rows"]), *(f"  {note}" for note in cell.get("notes", ()))):
            show.line(text)
    return rows


def write_attention(cells: list[dict | None], out: Path) -> None:
    """Write OUT/attention.json, [{kernel, bits, tokens, ms, bytes, fraction_of_bandwidth, speedup, ...}],
    from the cells that could be made, and print it."""
    cells = [cell for cell in cells if cell]
    rows = [row | {"machine": cell["machine"]} for cell in cells for row in cell["rows"]]
    write_json(out / "attention.json", rows)
    console = Verbatim()
    console.print(attention_table(rows))
    for first in rows[:1]:
        console.print(
            f"{first['machine']['cpu']}, {first['machine']['cores']} cores; "
            f"read bandwidth {first['bandwidth_gbps']:.1f} GB/s on one thread; {out / 'attention.json'}"
        )


def attention_table(rows: list[dict]) -> Table:
    """The rows, for the terminal."""
    title = f"decode attention, {HEADS} KV heads of {HEAD_DIM}, one thread"
    made = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for column in ("tokens", "kernel", "bits", "ms", "min–max", "MB", "of bandwidth", "speed-up"):
        made.add_column(column, justify="left" if column == "kernel" else "right")
    for row in rows:
        made.add_row(
            f"{row['tokens']:,}", row["kernel"], f"{row['bits']:.2f}", f"{row['ms']:.2f}",
            f"{row['ms_min']:.2f}–{row['ms_max']:.2f}", f"{row['bytes'] / 1e6:.1f}",
            f"{row['fraction_of_bandwidth']:.0%}", f"{row['speedup']:.1f}×",
        )  # fmt: skip
    return made


def write_static_graph(cells: dict[str, dict], out: Path, show) -> None:
    """Write OUT/measured.json, {experiment: {threads, rows}}, and print a table for each experiment."""
    measured = {
        name: {"threads": cell["machine"]["threads"], "rows": cell["rows"]} for name, cell in cells.items()
    }
    write_json(out / "measured.json", measured)
    for name, found in measured.items():
        print(f"\n{name}, {found['threads']} thread\n\n{markdown(found['rows'], COLUMNS[name])}", flush=True)


def markdown(rows: dict, columns: dict) -> str:
    """Markdown: one line for each row, a column for each (title: function of the row)."""
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    for name, row in rows.items():
        lines.append(f"| {name} | " + " | ".join(show(row) for show in columns.values()) + " |")
    return "\n".join(lines)
