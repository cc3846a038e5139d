"""The study `attention` for the eye: attention.json and a table in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from ..core.results import write_json
from ..studies.attention import HEAD_DIM, HEADS


def write(cells: list[dict | None], out: Path) -> None:
    """Write OUT/attention.json, [{kernel, bits, tokens, ms, bytes, fraction_of_bandwidth, speedup, ...}],
    from the cells that could be made, and print it."""
    cells = [cell for cell in cells if cell]
    rows = [row | {"machine": cell["machine"]} for cell in cells for row in cell["rows"]]
    write_json(out / "attention.json", rows)
    console = Console()
    console.print(table(rows))
    for first in rows[:1]:
        console.print(
            f"{first['machine']['cpu']}, {first['machine']['cores']} cores; "
            f"read bandwidth {first['bandwidth_gbps']:.1f} GB/s on one thread; {out / 'attention.json'}"
        )


def table(rows: list[dict]) -> Table:
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
