"""The key to the exercises: compressed text, so that nobody reads an answer by accident.

`key.z` is made from the answers and checks in course/exercises/ and from what is folded away in notebooks/
(hints, solutions, answers to the questions of *Predict* and *Quiz*), neither of which a learner is handed.
After a change there:

    python course/teaching/check/key.py
"""

from __future__ import annotations

import html
import json
import re
import zlib
from itertools import pairwise
from pathlib import Path

KEY = Path(__file__).with_name("key.z")
ROOT = Path(__file__).resolve().parents[3]
FOLD = re.compile(r"<details>\s*<summary>(.*?)</summary>(.*?)</details>\s*", re.S)
FOLDS = re.compile(rf"(?:{FOLD.pattern})+", re.S)  # one after the other: what belongs to one question
HELP = re.compile(r"Hint \d|Solution")


def read() -> dict:
    """{"answers" and "checks": {file name: its text}, "help": {exercise: {"hints": three texts, "solution":
    text}}, "questions": {"2.1", the first of chapter 2: {choice or "Answer": text}}}"""
    return json.loads(zlib.decompress(KEY.read_bytes()))


def make() -> dict:
    """The same from the sources."""
    answers, checks = (
        {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted((ROOT / "course/exercises").glob(kind))
        }
        for kind in ("*.txt", "*.py")
    )
    found, asked = {}, {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [
            (cell["cell_type"], "".join(cell["source"]))
            for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        ]
        for (_, before), (_, source) in pairwise(cells):
            if "### BEGIN SOLUTION" in source and (exercise := exercise_of(source)):
                found[exercise] = _help(before, source)
        folded = [fold for kind, source in cells if kind == "markdown" for fold in questions(source)]
        for number, fold in enumerate(folded, 1):
            asked[f"{int(path.name[:2])}.{number}"] = fold
    return {"answers": answers, "checks": checks, "help": found, "questions": asked}


def exercise_of(source: str) -> str:
    """The exercise that a cell checks, or "": a number that is compared with a measurement is none."""
    found = re.search(r"^check\.(?!measured|reveal|board|question|clause17)(\w+)\(", source, re.M)
    return found[1] if found else ""


def questions(source: str) -> list[dict[str, str]]:
    """What a Markdown cell folds away, {summary: text} for each question; hints and solutions are none."""
    runs = [
        {_words(what): _words(text) for what, text in FOLD.findall(run[0])} for run in FOLDS.finditer(source)
    ]
    return [run for run in runs if not any(HELP.fullmatch(what) for what in run)]


def _help(prose: str, code: str) -> dict:
    """Hints and solution of one exercise, from the cell with its task and the cell with its code."""
    parts = [(what, _words(text)) for what, text in FOLD.findall(prose) if HELP.fullmatch(what)]
    lines = re.search(r"### BEGIN SOLUTION\n(.*?)\n *### (?:INSTEAD|END)", code, re.S)[1]
    said = [text for what, text in parts if what == "Solution"]
    return {
        "hints": [text for what, text in parts if what != "Solution"],
        "solution": "\n\n".join([*said, lines]),
    }


def _words(text: str) -> str:
    return html.unescape(re.sub(r"<.*?>", "", " ".join(text.split())))


if __name__ == "__main__":
    KEY.write_bytes(zlib.compress(json.dumps(make(), ensure_ascii=False).encode(), 9))
