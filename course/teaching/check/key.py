"""The key to the exercises: compressed text, so that nobody reads an answer by accident.

`key.z` is made from the checks in exercises/ and from the hints and solutions in notebooks/, neither of which
a learner is handed. After a change there:

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
SUMMARY = re.compile(r"<details><summary>(Hint \d|Solution)</summary>(.*?)</details>", re.S)


def read() -> dict:
    """{"checks": {file name: its text}, "help": {exercise: {"hints": three texts, "solution": text}}}"""
    return json.loads(zlib.decompress(KEY.read_bytes()))


def make() -> dict:
    """The same from the sources."""
    checks = {
        path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "exercises").glob("*.py"))
    }
    found = {}
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for before, cell in pairwise(cells):
            code = "".join(cell["source"])
            if "### BEGIN SOLUTION" in code:
                name = re.search(r"^check\.(\w+)\(", code, re.M)[1]
                found[name] = _help("".join(before["source"]), code)
    return {"checks": checks, "help": found}


def _help(prose: str, code: str) -> dict:
    """Hints and solution of one exercise, from the cell with its task and the cell with its code."""
    parts = [(what, _words(text)) for what, text in SUMMARY.findall(prose)]
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
