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
beside its mistake: ? is behind those that are true but vague, ! would be behind a false one. The page of all
rows is made by `python tests/course/teaching/planted.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

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
    """All rows as a page of Markdown, with the counts of each exercise on top."""
    rows = read()[1]
    parts = [HEAD, _table("exercise|mistakes|" + "|".join([*TELLS.values(), *JUDGED.values()]))]
    for name in [*dict.fromkeys(row.exercise for row in rows), "all"]:
        some = [row for row in rows if name in (row.exercise, "all")]
        counts = [sum(row.tells == kind for row in some) for kind in TELLS]
        counts += [sum(row.judged == mark for row in some) for mark in JUDGED]
        parts.append(f"| {' | '.join(map(str, [name, len(some), *counts]))} |")
    parts += ["", _table("exercise|planted|what the check says|it tells|a reader")]
    for row in rows:
        shown = f"`` {' ⏎ '.join(row.change.splitlines())} ``".replace("|", "\\|")
        told = row.sentence.replace("|", "\\|").replace("<", "&lt;")
        parts.append(f"| {row.exercise} | {shown} | {told} | {TELLS[row.tells]} | {JUDGED[row.judged]} |")
    return "\n".join(parts) + "\n"


HEAD = """# Planted mistakes

What the checks say of wrong answers that were planted in right ones; a test compares, and
`python tests/course/teaching/planted.py` makes this page. *names it*: the sentence says what is wrong in the
answer. *a symptom*: it says what is seen in the result, truly. *only wrong*: it says little more than that.
The last column is a reader's, who read each sentence beside its mistake. The checks were written with these
mistakes in view, so the table says little of others. A reader who had not seen them planted 137 of their own
(28 November 2026): the checks named 43, told a true symptom of 68, said only "wrong" of 7, said something
false or misleading of 11, and accepted 8. What was accepted is refused since, and most of it is in the list.
A second one wrote 377 (29 November 2026): the checks named 291, told a true symptom of 71, said only "wrong"
of 7, said something misleading of 3, and accepted 5, which were right numbers in a list where the next line
wants a tensor. These are still accepted, and the check now says what the next line wants. Of 58 that were
written after the checks had learned from those, they named 37 and told a true symptom of 21.
"""


def _table(columns: str) -> str:
    names = columns.split("|")
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
