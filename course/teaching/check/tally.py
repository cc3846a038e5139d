"""The board: what a learner has predicted and solved since a notebook was started.

With KVLAB_BOARD=FOLDER in the environment every change is also written to a file there, named after
KVLAB_NAME or the machine's user, so that whoever teaches sees who is stuck: `python -m course board FOLDER`.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from pathlib import Path

CHOSEN: dict[str, str] = {}  # question -> the number of the proposal; "" where the answer came first
FORESEEN: dict[str, bool] = {}  # question -> whether the measurement agreed
TRIED: dict[str, bool] = {}  # exercise -> whether its last answer was correct


def note(exercise: str, correct: bool) -> None:
    """An exercise was answered, or its cell was run; what was solved once stays solved."""
    TRIED[exercise] = TRIED.get(exercise, False) or correct
    share()


def foresaw(question: str, right: bool) -> None:
    """A prediction was answered; only the first answer counts."""
    FORESEEN.setdefault(question, right)
    share()


def share() -> None:
    """Write what a learner has solved to the shared board, beside what other notebooks have written there."""
    folder = os.environ.get("KVLAB_BOARD")
    if not folder:
        return
    who = os.environ.get("KVLAB_NAME") or getpass.getuser()
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9._-]', '_', who)}.json"
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        tried, foreseen = dict(before["tried"]), dict(before["foreseen"])
    except (OSError, ValueError, KeyError, TypeError):
        tried, foreseen = {}, {}
    tried |= {name: tried.get(name, False) or correct for name, correct in TRIED.items()}
    told = {"name": who, "tried": tried, "foreseen": FORESEEN | foreseen}
    try:
        path.write_text(json.dumps(told), encoding="utf-8")
    except OSError as error:  # a board that cannot be reached must not stop a learner
        print(f"(the shared board was not updated: {error.strerror})")


def show() -> None:
    """Print the counts, and what is still open."""
    print(
        f"predictions: {sum(FORESEEN.values())} of {len(FORESEEN)} came true"
        if FORESEEN
        else "predictions: none"
    )
    solved = [name for name, correct in TRIED.items() if correct]
    if TRIED:
        print(f"exercises: {len(solved)} solved{': ' if solved else ''}{', '.join(solved)}")
    if still := [name for name, correct in TRIED.items() if not correct]:
        print(f"still open: {', '.join(still)}")


def table(folder: Path) -> str:
    """One line for each learner's file: solved, still open, predictions that came true."""
    lines = [f"{'':20}{'solved':>7}  {'foreseen':>8}  still open"]
    for path in sorted(folder.glob("*.json")):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
            tried, foreseen, name = one["tried"], one["foreseen"], str(one["name"])
            still = ", ".join(what for what, correct in tried.items() if not correct)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            lines.append(f"{path.name:20} cannot be read")
            continue
        came = f"{sum(map(bool, foreseen.values()))}/{len(foreseen)}"
        lines.append(f"{name[:20]:20}{sum(map(bool, tried.values())):7}  {came:>8}  {still}")
    return "\n".join(lines)
