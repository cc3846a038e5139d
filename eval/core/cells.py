"""Cells as text: JSON with a checksum of its content; one line for any other text."""

from __future__ import annotations

import hashlib
import json
import math

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


def written(cell: dict) -> bytes:
    """The text of a cell's file."""
    return as_json(cell | {SUM: digest(json.loads(as_json(cell)))})


def digest(cell: dict) -> str:
    """Sixteen hex digits of what a cell says, however it is written down."""
    return hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()[:16]


def parsed(data: bytes) -> dict:
    """A cell from its file's content. Raises ValueError for what is damaged, or is no cell."""
    cell = from_json(data.decode("utf-8"))
    _look_through(cell)
    if not isinstance(cell, dict) or any(field not in cell for field in FIELDS):
        raise ValueError("it is not a complete cell")
    total = cell.pop(SUM, None)
    if total is not None and total != digest(cell):
        raise ValueError("its content is not what was written")
    _check(cell, KINDS)
    for row in cell.get("metrics", ()):
        if not isinstance(row, dict):
            raise ValueError(f"metrics holds {str(row)[:20]} in the place of a row")
        if missing := [name for name in ROW if name not in row]:
            raise ValueError(f"a row of metrics has no {missing[0]}")
        _check(row, ROW)
    return cell


def check_sample(line) -> None:
    """ValueError for what is no line of samples (`eval/accuracy/samples.py`)."""
    if not isinstance(line, dict) or not line.keys() >= {*SAMPLE}:
        raise ValueError(f"a line lacks one of {', '.join(SAMPLE)}")
    _check(line, LINE)
    for one in line.get("evidence", ()):
        shares = one.get("held") if isinstance(one, dict) else None
        texts = one["tokens"] if isinstance(shares, list) and isinstance(one.get("tokens"), list) else None
        if texts is None or len(texts) != len(shares):
            raise ValueError(f"evidence holds {str(one)[:20]!r}")
        if strange := [share for share in shares if not isinstance(share, NUMBER[:2]) or not 0 <= share <= 1]:
            raise ValueError(f"evidence was held to {str(strange[0])[:20]!r}")


def _check(cell: dict, kinds: dict) -> None:
    for name, kind in kinds.items():
        if name in cell and not isinstance(cell[name], kind):
            raise ValueError(f"{name} is {str(cell[name])[:20]!r}, which no cell says")


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
