"""What real models wrote under each method, in words: measured once, stored, shown (course/asking.py).

Where SmolLM2 is on this machine, `asked` asks it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kvlab.ask import ask
from kvlab.models import load

from . import lease

STORED = Path(__file__).with_name("words.json")
NEAR = 13, 21  # the clauses that a machine without a GPU reads while one waits
CITY = lease.CITIES[1]  # of the lease that was asked about: Oslo, since a model that knows nothing says Paris


@cache
def stored() -> dict:
    """{study: model, digest, asked, columns, rows, made}."""
    return json.loads(STORED.read_text(encoding="utf-8"))


def asked(*methods: str) -> None:
    """Print what SmolLM2 says about clause 17 under each method, the question not known when it compresses:
    asked here and now about some clauses of the lease where the model was fetched, else as `said`."""
    try:
        model, tokenizer = load("smollm2")
    except ValueError:
        said(*methods, known=False)
        print("(`kvlab fetch smollm2` puts the model on your machine; then this cell asks it)")
        return
    print(lease.ASKED.strip().replace("\n", " ") + " ...")
    text = lease.written(lease.LETTER.format(CITY), *NEAR)
    for method in methods:
        answer = ask(model, tokenizer, text, lease.ASKED, method, max_new_tokens=8)
        print(f"  {method:24} {answer.text.strip().splitlines()[0]!r}")
    print("(SmolLM2-135M-Instruct, asked here and now about clauses {} to {})".format(*NEAR))


def said(*methods: str, known: bool = True) -> int:
    """Print what SmolLM2 says about clause 17 of the lease under each method; known: whether the question was
    in the text when the method compressed it. Returns how many answers begin with the city. ValueError for a
    method that was not asked."""
    study = stored()["clause"]
    print(study["asked"].replace("\n", " ") + " ...")
    answers = [_row("clause", method)[1 if known else 2].strip().splitlines()[0] for method in methods]
    for method, answer in zip(methods, answers, strict=True):
        print(f"  {method:24} {answer!r}")
    when = "known" if known else "not known"
    print(
        f"({study['model']}, digest {study['digest']}; the question {when} at compression; {study['made']})"
    )
    return sum(answer.startswith(CITY) for answer in answers)


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
