"""Checks for the exercises: `check.name(answer)` says correct, incorrect with the likely mistake, or not
attempted; `check.hint("name")` gives three steps, one at a time; `check.solution("name")` shows the solution
after a first attempt; `check.question("2.1", answer)` comments on an answer. `exercise.py` holds what the
checks share; the checks themselves are in `key.z`, which `key.py` makes and reads."""

from . import key
from .exercise import ATTEMPTED, EXERCISES, NOT_ATTEMPTED

_key = key.read()
for _file, _text in _key["checks"].items():
    exec(compile(_text, _file, "exec"), {"__name__": _file})
globals().update(EXERCISES)
HELP, QUESTIONS = _key["help"], _key["questions"]
_steps = dict.fromkeys(HELP, 0)  # the hint that comes next


def hint(name: str) -> None:
    """Print the next of an exercise's three hints."""
    if not _known(name):
        return
    hints, step = HELP[name]["hints"], _steps[name]
    more = "   (call it again for the next)" if step + 1 < len(hints) else ""
    print(f"hint {step + 1} of {len(hints)}: {hints[step]}{more}")
    _steps[name] = min(step + 1, len(hints) - 1)


def solution(name: str) -> None:
    """Print an exercise's solution, once an answer was tried."""
    if _known(name):
        print(HELP[name]["solution"] if name in ATTEMPTED else f"try it first: check.{name}(your answer)")


def question(name: str, answer) -> None:
    """Print what there is to say on an answer to a question of *Predict* or *Quiz*: on the proposal that was
    chosen, by its number, or the answer to compare one's own words with."""
    if name not in QUESTIONS:
        print(f"there is no question {name!r}: are this notebook and the installed kvlab from the same kit?")
        return
    given = "" if answer is ... or answer is None else str(answer).strip().strip("().").lower()
    replies = QUESTIONS[name]
    choices = {what.partition(".")[0]: what for what in replies}
    if not given:
        print(NOT_ATTEMPTED)
    elif len(replies) == 1:
        print("to compare with yours:", *replies.values())
    elif given in choices:
        print(f"{choices[given]}: {replies[choices[given]]}")
    else:
        print(f"{given!r} is none of the proposals: write one of {', '.join(choices)}")


def _known(name) -> bool:
    if name not in HELP:
        print(f"there is no exercise {name!r}; there are: {', '.join(HELP)}")
    return name in HELP
