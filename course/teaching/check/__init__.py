"""Checks for the exercises: `check.name(answer)` says correct, incorrect with the likely mistake, or not
attempted; `check.hint("name")` gives three steps, one at a time; `check.solution("name")` shows the solution
after a first attempt; `check.question("2.1", answer)` comments on an answer. `exercise.py` holds what the
checks share; the checks themselves are in `key.z`, which `key.py` makes and reads."""

import difflib
import re

from . import key
from .exercise import ATTEMPTED, EXERCISES, NOT_ATTEMPTED

_key = key.read()
for _file, _text in _key["checks"].items():
    _text = _text.replace("from course.", f"from {__package__.partition('.')[0]}.")  # installed: kvlab_course
    exec(compile(_text, _file, "exec"), {"__name__": _file})
globals().update(EXERCISES)
HELP, QUESTIONS = _key["help"], _key["questions"]
_steps = dict.fromkeys(HELP, 0)  # the hint that comes next


class Unknown(AttributeError):
    """A check that does not exist; a notebook shows it as one line, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def __getattr__(name: str):
    if name.startswith("_"):
        raise AttributeError(name)
    near = difflib.get_close_matches(name, [*EXERCISES, "hint", "solution", "question"], 1)
    meant = f"did you mean check.{near[0]}?" if near else f"there are {', '.join(EXERCISES)}"
    raise Unknown(f"there is no check.{name}: {meant}")


def hint(name: str = "") -> None:
    """Print the next of an exercise's three hints."""
    if not (name := _known(name)):
        return
    hints, step = HELP[name]["hints"], _steps[name]
    more = "   (call it again for the next)"
    if step + 1 == len(hints):
        more = f'   (that was the last; after a try of your own check.solution("{name}") shows a solution)'
    print(f"hint {step + 1} of {len(hints)}: {hints[step]}{more}")
    _steps[name] = min(step + 1, len(hints) - 1)


def solution(name: str = "") -> None:
    """Print an exercise's solution, once an answer was tried."""
    if name := _known(name):
        print(HELP[name]["solution"] if name in ATTEMPTED else f"try it first: check.{name}(your answer)")


def question(name: str = "", answer=...) -> None:
    """Print what there is to say on an answer to a question of *Predict* or *Quiz*: on the proposal that was
    chosen, by its number, or the answer to compare one's own words with."""
    if not isinstance(name, str) or not name:
        number = name or next(iter(QUESTIONS))
        print(f'the question comes first, in quotes: check.question("{number}", answer)')
        return
    if name not in QUESTIONS:
        print(f"there is no question {name!r}: are this notebook and the installed kvlab from the same kit?")
        return
    given = "" if answer is ... or answer is None else str(answer).strip().strip("().").lower()
    replies = QUESTIONS[name]
    choices = {what.partition(".")[0]: what for what in replies}
    if not given:
        print(NOT_ATTEMPTED)
    elif len(replies) == 1:
        (reply,) = replies.values()
        number = re.search(r" = ([\d.]+)\.$", reply)  # the answer is one number: it can be judged
        said = "to compare with yours"
        if number and re.fullmatch(r"\d+(?:\.\d+)?", given):
            said = "correct" if float(given) == float(number[1]) else f"incorrect, it is not {given}"
        print(f"{said}: {reply}")
    elif given in choices:
        print(f"{choices[given]}: {replies[choices[given]]}")
    else:
        print(f"{given!r} is none of the proposals: write one of {', '.join(choices)}")


def _known(name) -> str:
    """The exercise that is meant: by its name, or by the function or check of that name; "" where none is."""
    name = getattr(name, "name", getattr(name, "__name__", name))
    if name in HELP:
        return name
    near = difflib.get_close_matches(str(name), HELP, 1)
    meant = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(HELP)}"
    print(f"there is no exercise {name!r}; {meant}" if name else f"which exercise? {meant}")
    return ""
