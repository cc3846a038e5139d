"""What real models wrote under each method, in words: measured once, stored, shown (course/words.py)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from . import lease

STORED = Path(__file__).with_name("words.json")
CITY = lease.CITIES[1]  # of the lease that was asked about: Oslo, since a model that knows nothing says Paris


@cache
def stored() -> dict:
    """{study: model, digest, asked, columns, rows, made}."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def said(*methods: str, known: bool = True) -> None:
    """Print what SmolLM2 says about clause 17 of the lease under each method; known: whether the question was
    in the text when the method compressed it. ValueError for a method that was not asked."""
    study = stored()["clause"]
    print(study["asked"].replace("\n", " ") + " ...")
    for method in methods:
        print(f"  {method:24} {_row('clause', method)[1 if known else 2].strip().splitlines()[0]!r}")
    when = "known" if known else "not known"
    print(
        f"({study['model']}, digest {study['digest']}; the question {when} at compression; {study['made']})"
    )


def wrote(*methods: str, lines: int = 8) -> None:
    """Print what a model that writes code answered under each method, the first lines of it."""
    study = stored()["code"]
    print(study["asked"])
    for method in methods:
        words = _row("code", method)[1].strip().splitlines()
        print(f"--- {method}", *words[:lines], *(["..."] if len(words) > lines else []), sep="\n  ")
    print(
        f"({study['model']}, digest {study['digest']}, rounded to 4 bits before we saw it; {study['made']})"
    )


def _row(study: str, method: str) -> list[str]:
    rows = {row[0]: row for row in stored()[study]["rows"]}
    if method not in rows:
        raise ValueError(f"{method!r} was not asked; there are {', '.join(rows)}")
    return rows[method]
