"""Cells as text: JSON with a checksum of its content; one line for any other text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable

from kvlab.errors import STEERING
from kvlab.parameters import from_json, shown

from .files import as_json

FIELDS = ("model", "method", "task", "config", "seconds", "machine", "versions")
SUM = "sum"  # of all that a cell says otherwise; cells of earlier versions have none
DEEPEST = 32  # lists and dictionaries inside each other
LARGEST = 2**63  # of whole numbers that a table holds
NUMBER = (int, float, type(None))
KINDS = {
    "model": str, "method": str, "task": str, "config": dict, "machine": dict, "versions": dict,
    "seconds": NUMBER, "made": str, "metrics": list, "rows": (list, dict),
}  # fmt: skip
ROW = {"metric": str, "value": NUMBER, "stderr": NUMBER, "n": NUMBER}  # of `metrics`

SAMPLE = ("doc_id", "question", "gold", "answer", "right")  # what every line of samples has
LINE = {"doc_id": int, "question": str, "right": NUMBER, "choices": list, "evidence": list}
EVIDENCE = {"tokens": list, "held": list}


def written(cell: dict) -> bytes:
    """The text of a cell's file."""
    return as_json(cell | {SUM: digest(json.loads(as_json(cell)))})


def digest(cell: dict) -> str:
    """Sixteen hex digits of what a cell says, however it is written down."""
    return sum_of(json.dumps(cell, sort_keys=True).encode())


def sum_of(data: bytes) -> str:
    """Sixteen hex digits by which damage is noticed."""
    return hashlib.sha256(data).hexdigest()[:16]


def parsed(data: bytes) -> dict:
    """A cell from its file's content. Raises ValueError for what is damaged, or is no cell."""
    cell = from_json(data.decode("utf-8"))
    _look_through(cell)
    _check("it", cell, FIELDS, KINDS)
    total = cell.pop(SUM, None)
    if total is not None and total != digest(cell):
        raise ValueError("its content is not what was written")
    for row in cell.get("metrics", ()):
        _check("a row of metrics", row, ROW, ROW)
    return cell


def check_sample(line) -> None:
    """ValueError for what is no line of samples (`eval/accuracy/samples.py`)."""
    _check("a line", line, SAMPLE, LINE)
    for one in line.get("evidence", ()):
        _check("evidence", one, EVIDENCE, EVIDENCE)
        shares = all(isinstance(share, NUMBER[:2]) and 0 <= share <= 1 for share in one["held"])
        if not shares or len(one["tokens"]) != len(one["held"]):
            raise ValueError(f"evidence holds {str(one)[:40]!r}, no share of every token")


def _check(what: str, told, needed: Iterable[str], kinds: dict) -> None:
    """ValueError for what is no dictionary, lacks a name, or holds another kind of thing there."""
    if not isinstance(told, dict):
        raise ValueError(f"{what} is {str(told)[:20]!r}: expected names and values")
    if missing := [name for name in needed if name not in told]:
        raise ValueError(f"{what} has no {missing[0]}")
    for name, kind in kinds.items():
        if name in told and not isinstance(told[name], kind):
            raise ValueError(f"{name} is {str(told[name])[:20]!r}, which no cell says")


def _look_through(value, deep: int = 0) -> None:
    """ValueError for numbers that JSON has not, texts that steer a terminal, and lists in lists."""
    if deep > DEEPEST:
        raise ValueError(f"it holds more than {DEEPEST} lists in each other")
    if isinstance(value, dict):
        for name, one in value.items():
            _look_through(name, deep)
            _look_through(one, deep + 1)
    elif isinstance(value, list):
        for one in value:
            _look_through(one, deep + 1)
    elif isinstance(value, int | float):
        if not abs(value) < LARGEST and (isinstance(value, int) or not math.isfinite(value)):
            raise ValueError(f"it holds the number {shown(value)}")
    elif isinstance(value, str) and (found := STEERING.search(value)):
        raise ValueError(f"it holds the character {found[0]!r}")
