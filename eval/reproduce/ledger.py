"""Ledger: published numbers of others, beside our own stored cells (`ledger.toml`), for docs/ledger.md."""

from __future__ import annotations

import json
import math
import statistics
import tomllib
from pathlib import Path

from scipy.stats import t

from ..core.digests import ROOT
from . import collect, tables

ENTRIES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
HEAD = ["what", "published", "by whom, for what", "ours", "inside", "stored in"]
SURE = 1.96  # standard errors on either side: 95 %


def table(part: str) -> str:
    """One part of the ledger: each entry's published number, ours with its 95 % interval, and whether the one
    is inside the other. An entry whose cell has not been made says so."""
    body = []
    for entry in ENTRIES[part]:
        found, theirs = ours(entry), published(entry)
        where = f"`{entry['file']}`: {', '.join(map(str, entry['pick'].values()))}"
        made = found is not None and theirs is not None
        cells = [said(*found), inside(theirs, *found)] if made else ["not made yet", "–"]
        unit = entry.get("unit", "")
        told = "–" if theirs is None else f"{number(theirs)} {unit}".strip()
        body.append([entry["what"], told, entry["by"], *cells, where])
    return tables.markdown(HEAD, body)


def published(entry: dict) -> float | None:
    """A number, or that of another program that was measured here, in a row of its file (its `theirs`, or the
    entry's `value`)."""
    said = entry["published"]
    if not isinstance(said, dict):
        return said
    row = picked(stored(said["file"]), {key: one for key, one in said.items() if key != "file"})
    return row and entry.get("scale", 1) * row[entry.get("theirs", entry["value"])]


def ours(entry: dict) -> tuple[float, float | None, float | None] | None:
    """(value, low, high) of an entry's cell; None where it is not stored, and no ends where it has none."""
    rows = stored(entry["file"])
    row, base = picked(rows, entry["pick"]), None
    if "over" in entry:
        base = picked(rows, entry["pick"] | entry["over"])
    if row is None or ("over" in entry and base is None):
        return None
    if base is not None:
        return ratio(row["values"], base["values"])
    scale, name = entry.get("scale", 1), entry.get("value", "value")
    row = row | row.get("others", {}).get(name, {})  # of a metric that is not the task's first
    value = scale * row.get(name, row.get("value"))
    if row.get("stderr") is not None:
        away = SURE * scale * row["stderr"]
        return value, value - away, value + away
    ends = "low" in row and name != "perplexity"
    return (value, scale * row["low"], scale * row["high"]) if ends else (value, None, None)


def stored(file: str) -> list[dict]:
    """The rows of a file in docs/results; none where there is no such file."""
    path = ROOT / "docs" / "results" / file
    if not path.is_file():
        return []
    found = json.loads(path.read_text(encoding="utf-8"))
    if "settings" in found:
        return collect.read(path)
    return [row | (row.get("cost") or {}) for row in found.get("rows") or found["lines"]]


def picked(rows: list[dict], wanted: dict) -> dict | None:
    return next((row for row in rows if all(row.get(key) == one for key, one in wanted.items())), None)


def ratio(mine: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """A perplexity over another, with its interval over chunks. Both in nats a token, chunk by chunk."""
    apart = [a - b for a, b in zip(mine, theirs, strict=True)]
    away = t.ppf(0.975, len(apart) - 1) * statistics.stdev(apart) / math.sqrt(len(apart))
    return tuple(math.exp(statistics.mean(apart) + by) for by in (0, -away, away))


def number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def said(value: float, low: float | None, high: float | None) -> str:
    ends = "" if low is None else f" ({number(low)} to {number(high)})"
    return f"{number(value)}{ends}"


def inside(published: float, value: float, low: float | None, high: float | None) -> str:
    """Whether a published number is within our interval."""
    if low is None:
        return f"no interval; ours is {value / published:.2f} times it"
    return "yes" if low <= published <= high else "no"
