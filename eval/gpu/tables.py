"""Tables of docs/gpu.md: rows of what machines have written, as Markdown."""

from __future__ import annotations


def markdown(heads: list[str], rows: list[list], left: int = 1) -> str:
    """A table; the first `left` columns are words."""
    lines = ["| " + " | ".join(heads) + " |"]
    lines.append("|" + "---|" * left + "--:|" * (len(heads) - left))
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]) + "\n"


def rows_of(machine: dict, stage: str) -> list[dict]:
    """All rows of a stage, with the unit they are from."""
    return [
        row | {"unit": unit}
        for unit, found in machine["units"].items()
        if unit.split(":")[0] == stage
        for row in found["rows"]
    ]


def number(value, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def timed(row: dict, key: str = "") -> str:
    """A median and its quarters."""
    ms = row.get(f"{key}ms")
    if ms is None:
        return "–"
    return f"{number(ms)} ({number(row[f'{key}ms_low'])}–{number(row[f'{key}ms_high'])})"
