"""What the course's cells say of SmolLM2-135M, a model that people know: measured once, stored, shown.

The chapters run without that model. `python -m course smollm2` measures everything again (course/smollm2.py).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

STORED = Path(__file__).with_name("smollm2.json")


@cache
def stored() -> dict:
    """What was measured: model, revision, machine, and under `studies` a caption, columns and rows each."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def rows(name: str) -> list[list]:
    """The rows of one study. ValueError for a name that was not measured."""
    studies = stored()["studies"]
    if name not in studies:
        raise ValueError(f"{name!r} was not measured; there are {', '.join(studies)}")
    return studies[name]["rows"]


def show(name: str) -> None:
    """Print one study as a table, with what it was measured on and how to measure it here."""
    table, study = rows(name), stored()["studies"][name]
    text = [[_said(value) for value in row] for row in (study["columns"], *table)]
    wide = [max(map(len, column)) for column in zip(*text, strict=True)]
    print(f"{stored()['model']}, {study['caption']}")
    for line in text:
        cells = [value.rjust(width) for value, width in zip(line, wide, strict=True)]
        print("  ".join([line[0].ljust(wide[0]), *cells[1:]]).rstrip())
    print(
        f"(Stored: revision {stored()['revision']}, {study['made']}. Here: kvlab fetch smollm2,"
        f" then python -m course smollm2 {name})"
    )


def _said(value) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
