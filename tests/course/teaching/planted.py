"""Right answers as learners write them, and mistakes planted in the first of them, with what the checks say:
planted/chNN.txt.

    # exercise
    a right answer

    +
    another one
    - part => what is there instead
    >n the sentence that is said; … is for what differs from draw to draw
    -
    an answer of its own
    >s? the sentence

n: it names the mistake; s: it tells a symptom; w: it says little more than "wrong". Each sentence was read
beside its mistake: ? is behind those that are true but vague, ! would be behind a false one. The tables of
the page are made by `python tests/course/teaching/planted.py`.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from course.teaching.check.exercise import EXERCISES

PAGE = Path(__file__).resolve().parents[3] / "course" / "instructor" / "mistakes.md"
TELLS = {"n": "names it", "s": "a symptom", "w": "only wrong"}
JUDGED = {"": "true", "?": "true but vague", "!": "false"}


class Planted(NamedTuple):
    """change: what was changed in the right answer, or the whole answer. tells, judged: see above."""

    exercise: str
    change: str
    code: str
    sentence: str
    tells: str
    judged: str


@functools.cache
def drawn(name: str) -> tuple:
    """What an exercise is checked on: drawn once, for all tests."""
    return EXERCISES[name].drawn(0)


def read() -> tuple[dict[str, list[str]], list[Planted]]:
    """Right answers to each exercise, and all rows."""
    right, rows = {}, []
    for path in sorted(Path(__file__).with_name("planted").glob("*.txt")):
        for section in re.split(r"^# ", path.read_text(encoding="utf-8"), flags=re.M)[1:]:
            head, *parts = re.split(r"^-", section, flags=re.M)
            name, _, bodies = head.partition("\n")
            right[name] = [body.strip("\n") for body in re.split(r"^\+$", bodies, flags=re.M)]
            rows += [_row(name, right[name][0], part) for part in parts]
    return right, rows


def _row(name: str, right: str, part: str) -> Planted:
    body, tells, judged, sentence = re.fullmatch(r"(.*)^>([nsw])([?!]?) (.*?)\s*", part, re.S | re.M).groups()
    code = body.strip("\n")
    if not body.startswith("\n"):  # a part of the right answer, and what is there instead
        old, _, new = body.strip().replace("\\n", "\n").partition(" =>")
        assert old in right, f"{name}: {old}"
        code = right.replace(old, new.removeprefix(" "))
    return Planted(name, body.strip("\n").strip(), code, sentence, tells, judged)


def page() -> str:
    """The page with all rows in its second table, and the counts of each exercise in its first."""
    rows, counted = read()[1], _table("exercise|mistakes|" + "|".join([*TELLS.values(), *JUDGED.values()]))
    for name in [*dict.fromkeys(row.exercise for row in rows), "all"]:
        some = [row for row in rows if name in (row.exercise, "all")]
        counts = [sum(row.tells == kind for row in some) for kind in TELLS]
        counts += [sum(row.judged == mark for row in some) for mark in JUDGED]
        counted += f"| {' | '.join(map(str, [name, len(some), *counts]))} |\n"
    told = _table("exercise|planted|what the check says|it tells|a reader")
    for row in rows:
        shown = f"`` {' ⏎ '.join(row.change.splitlines())} ``".replace("|", "\\|")
        said = row.sentence.replace("|", "\\|").replace("<", "&lt;")
        told += f"| {row.exercise} | {shown} | {said} | {TELLS[row.tells]} | {JUDGED[row.judged]} |\n"
    tables = iter((counted, told))
    return re.sub(r"(^\|.*\n)+", lambda _: next(tables), PAGE.read_text(encoding="utf-8"), flags=re.M)


def _table(columns: str) -> str:
    names = columns.split("|")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
