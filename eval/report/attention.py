"""Attention: the kernels' times beside fp32's, for the terminal, for a file and for the documents."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.table import Table

from ..core.files import write_json
from ..core.show import Verbatim
from .rows import provenance

ABOUT = "Attention of a decode step by the kernels, CPU time, with nothing in the processor's cache"


def rows(cells: Iterable[dict]) -> list[dict]:
    """The rows of these cells, each with all that it stands on."""
    found = []
    for cell in sorted(cells, key=lambda cell: cell["config"]["tokens"]):
        shared = {"simd": cell["config"]["simd"], "threads": cell["machine"]["threads"]}
        shared |= provenance(cell, "data")
        found += [shared | row for row in cell["rows"]]
    return found


def write(cells: list[dict], out: Path) -> None:
    """Write OUT/attention.json, [{shape, kernel, bits, tokens, ms, fraction_of_bandwidth, ...}]; print it."""
    found = rows(cells)
    write_json(out / "attention.json", found)
    console = Verbatim()
    for shape in dict.fromkeys(row["shape"] for row in found):
        console.print(table(shape, [row for row in found if row["shape"] == shape]))
    for first in found[:1]:
        console.print(f"{first['machine']}, {first['simd']}; {out / 'attention.json'}")


def table(shape: str, found: list[dict]) -> Table:
    """The rows of one shape, for the terminal."""
    made = Table(
        title=f"decode attention, {shape}, CPU time of {of(found[0]['threads'])}",
        box=box.SIMPLE,
        pad_edge=False,
    )
    for column in ("tokens", "kernel", "bits", "ms", "quartiles", "MB", "of bandwidth", "speed-up"):
        made.add_column(column, justify="left" if column == "kernel" else "right")
    for row in found:
        made.add_row(
            f"{row['tokens']:,}", row["kernel"], f"{row['bits']:.2f}", f"{row['ms']:.2f}",
            f"{row['ms_low']:.2f}–{row['ms_high']:.2f}", f"{row['bytes'] / 1e6:.1f}",
            f"{row['fraction_of_bandwidth']:.0%}", f"{row['speedup']:.1f}×",
        )  # fmt: skip
    return made


def fractions(found: list[dict], simd: str, tokens: int) -> tuple[list[str], list[list[str]], list[dict]]:
    """Formats by heads, over so many tokens: the share of the read bandwidth, and how many times as fast as
    fp32 sdpa; the rows that this is made of."""
    mine = [row for row in found if row["simd"] == simd and row["tokens"] == tokens]
    mine = [row for row in mine if not row["kernel"].endswith("-decode")]
    at = {(row["kernel"], row["shape"]): row for row in mine}
    shapes, kernels = (list(dict.fromkeys(row[key] for row in mine)) for key in ("shape", "kernel"))
    body = [[f"`{kernel}`", *(said(at.get((kernel, shape))) for shape in shapes)] for kernel in kernels]
    return [f"{tokens:,} tokens: of the bandwidth (over sdpa)", *shapes], body, mine


def said(row: dict | None) -> str:
    """A share of the bandwidth, and the ratio to fp32 sdpa."""
    return "–" if row is None else f"{row['fraction_of_bandwidth']:.0%} ({row['speedup']:.1f})"


def of(threads: int) -> str:
    """Whose CPU time it is."""
    return "one thread" if threads == 1 else f"{threads} threads added up"


def stands_on(found: list[dict]) -> str:
    """One paragraph: what these numbers are of."""
    one, read = found[0], [row["bandwidth_gbps"] for row in found]
    made = f"made {one['made'][:10]}, code {one['code_digest']}"
    return (
        f"{one['machine']}, {one['simd']}, torch {one['torch']}; medians of CPU time of "
        f"{of(one['threads'])}, which read {min(read):.1f} to {max(read):.1f} GB/s; {made}."
    )
