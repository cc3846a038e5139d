"""Mistakes that were planted in right answers, and what the checks say of them: planted/chNN.txt.

    # exercise
    a right answer

    - part => what is there instead
    > the sentence that is said; … is for what differs from draw to draw
    -
    an answer of its own
    > the sentence

Each sentence was read and found true of its mistake, and none is taken from the lists that the checks have.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Planted(NamedTuple):
    exercise: str
    code: str
    sentence: str


def read() -> tuple[dict[str, str], list[Planted]]:
    """A right answer to each exercise, and all rows."""
    right, rows = {}, []
    for path in sorted(Path(__file__).with_name("planted").glob("*.txt")):
        for section in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            head, *parts = re.split(r"^-", section, flags=re.M)
            name, _, body = head.partition("\n")
            right[name] = body.strip("\n")
            rows += [_row(name, right[name], part) for part in parts]
    return right, rows


def _row(name: str, right: str, part: str) -> Planted:
    edit, _, rest = part.partition("\n")
    code, _, sentence = rest.rpartition("> ") if rest.startswith("> ") else rest.rpartition("\n> ")
    if edit:
        old, _, new = edit.strip().replace("\\n", "\n").partition(" =>")
        assert old in right, f"{name}: {old}"
        code = right.replace(old, new.removeprefix(" "))
    return Planted(name, code, sentence.strip())
