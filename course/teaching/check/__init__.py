"""Checks for the exercises: `check.name(answer)` says correct, incorrect with the likely mistake, or not
attempted; `check.hint("name")` gives three steps, one at a time; `check.solution("name")` shows the solution
after a first attempt; `check.measured(yours, measured)` compares a number with what a cell has found.
`check.clause17(model, tokenizer, MyCache)` asks a cache of one's own about clause 17.
`check.question("2.1", choice)` keeps a prediction, `check.reveal("2.1")` tells whether it came true, and
`check.board()` counts. `exercise.py` holds what the checks share; the checks themselves are in `key.z`, which
`key.py` makes and reads."""

import difflib
import math
import re

from torch import Tensor

from . import key, planted, tally
from .answer import plain, same
from .exercise import ATTEMPTED, EXERCISES, NOT_ATTEMPTED, NUMBERS
from .sentences import first_wrong

_key = key.read()
for _text in _key["answers"].values():
    planted.read(_text)
for _file, _text in _key["checks"].items():
    _text = _text.replace("from course.", f"from {__package__.partition('.')[0]}.")  # installed: kvlab_course
    exec(compile(_text, _file, "exec"), {"__name__": _file})
globals().update(EXERCISES)
HELP, QUESTIONS = _key["help"], _key["questions"]
_steps = dict.fromkeys(HELP, 0)  # the hint that comes next
ASKS = {}  # clause17: what asks a cache; `mine` puts it here, since it imports the checks
REFUSED = {}  # caches that did not answer for clause 17, or wrongly: whether the parts as they were take over


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
    """Keep the proposal that was chosen in *Predict*, by its number, until `reveal` answers it; in *Quiz*,
    print the answer to compare one's own words with."""
    if not isinstance(name, str) or not name:
        number = name or next(iter(QUESTIONS))
        print(f'the question comes first, in quotes: check.question("{number}", answer)')
        return
    if name not in QUESTIONS:
        print(f"there is no question {name!r}: are this notebook and the installed kvlab from the same kit?")
        return
    given = "" if answer is ... or answer is None else str(answer).strip().strip("().").lower()
    choices = _choices(name)
    if not given:
        print(NOT_ATTEMPTED)
    elif len(choices) == 1:
        _compare(given, *QUESTIONS[name].values())
    elif name in tally.FORESEEN or tally.CHOSEN.get(name) == "":
        print("its answer has been shown: a choice is not counted any more")
    elif given in choices:
        tally.CHOSEN[name] = given
        print(f"kept: you say {choices[given]}. A later cell answers.")
    else:
        print(f"{given!r} is none of the proposals: write one of {', '.join(choices)}")


def _choices(name: str) -> dict[str, str]:
    """{"1": "1. the proposal"} of a question."""
    return {what.partition(".")[0]: what for what in QUESTIONS[name]}


def _compare(given: str, reply: str) -> None:
    """Print the answer to a question of *Quiz*; where it is one number, say whether it was given."""
    number, said = re.search(r" = ([\d.]+)\.$", reply), "to compare with yours"
    if number and re.fullmatch(r"\d+(?:\.\d+)?", given):
        said = "correct" if float(given) == float(number[1]) else f"incorrect, it is not {given}"
    print(f"{said}: {reply}")


def reveal(name: str) -> None:
    """Print the answer to a question of *Predict* now that it is measured, and what there is to say on the
    proposal that was chosen."""
    choices, yours = _choices(name), tally.CHOSEN.setdefault(name, "")
    right = next(number for number, what in choices.items() if QUESTIONS[name][what].startswith("Yes"))
    reason = re.sub(r"^Yes\W*", "", QUESTIONS[name][choices[right]])
    if yours:
        tally.foresaw(name, yours == right)
    if yours not in ("", right):
        print(f"You chose {choices[yours]}. {QUESTIONS[name][choices[yours]]}")
    said = "You were right" if yours == right else "The answer"
    print(f"{said}: {choices[right]}. {reason[:1].upper()}{reason[1:]}")


def measured(yours, value: float | str | Tensor, tolerance: float = 0.01, of: type | None = None) -> None:
    """Compare a number with what a cell has measured or computed: correct, by how much too large or small, or
    not attempted. value: that number, or the name of one that the key has. An int below 1,000 is exact. Of a
    tensor every number counts. of: the class that gave it; `mine.keep` takes that only where it is right."""
    if of is not None:
        REFUSED[of] = True
    value = NUMBERS[value] if isinstance(value, str) else value
    if yours is ... or yours is None:
        print(NOT_ATTEMPTED)
        return
    if isinstance(value, Tensor):
        if _all_of(plain(yours), value):
            REFUSED.pop(of, None)
        return
    near = 0 if isinstance(value, int) and abs(value) < 1000 else tolerance * abs(value)
    yours = yours.item() if getattr(yours, "ndim", None) == 0 else yours  # of torch or numpy
    if isinstance(yours, bool) or not isinstance(yours, int | float) or not math.isfinite(yours):
        print(f"a number is expected, not {yours if isinstance(yours, float) else type(yours).__name__}")
    elif abs(yours - value) <= near:
        print(f"correct: you say {_number(yours)}, and the right number is {_number(value)}")
    else:
        print(f"incorrect: your {_number(yours)} {_off(yours, value)}")


def _all_of(yours, value: Tensor) -> bool:
    if not isinstance(yours, Tensor) or yours.shape != value.shape:
        print(f"incorrect: {value.numel()} numbers of shape {list(value.shape)} are expected")
        return False
    right = same(yours, value)
    said = f"correct: you say {value.numel()} numbers, and all of them are right"
    print(said if right else f"incorrect: {first_wrong(yours, value)}")
    return right


def _off(yours: float, value: float) -> str:
    """How far a number is from the right one: the difference of near counts, else the ratio."""
    if not value:
        return "should be 0"
    off = yours - value
    if isinstance(value, int) and off == int(off) and abs(off) < max(abs(value) / 2, 5):
        return f"is {abs(off):,.0f} {'more' if off > 0 else 'fewer'} than the right number"
    times = f"{yours / value:.3g}"
    return f"is {times} times the right number" if times != "1" else "is near, and it must be exact"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def clause17(
    model, tokenizer, made, right: int = 6, turned: dict | None = None, **within: tuple[float, float]
) -> None:
    """Ask a cache of one's own about clause 17 of six leases: correct where it answers as many as it can
    answer (right), else what its answers show; not attempted while a `...` is left. within: the least and the
    most that numbers of its `Stats` may be, where a cache without the learner's line answers, too. turned:
    settings with which it must give the course's numbers; {}: with its own."""
    found = ASKS["clause17"](model, tokenizer, made)
    answered, stats = found or (0, None)
    REFUSED[made] = stats is None
    if stats is None:
        tally.note("clause17", False)
        print(NOT_ATTEMPTED if found is None else "incorrect: it stops before all leases are answered")
        return
    off = [name for name, (least, most) in within.items() if not least <= getattr(stats, name) <= most]
    same = turned is None or answered < right or off or ASKS["as_course"](model, tokenizer, made, turned)
    tally.note("clause17", answered >= right and not off and same)
    for name in off:
        held, span = getattr(stats, name), " to ".join(f"{one:,.0f}" for one in sorted({*within[name]}))
        print(f"incorrect: {name.replace('_', ' ')}: {held:,}, expected {span}: what does your line do?")
    if off:
        return
    if not same:
        said = ", ".join(f"{name} = {value}" for name, value in turned.items()) or "its settings"
        print(f"incorrect: with {said} its numbers are not the course's: what does your line do?")
    elif answered >= right:
        del REFUSED[made]
        print(f"correct: your cache answers {answered} of 6 leases")
    elif answered:
        print(f"incorrect: {answered} of 6 leases answered, and {right} can be: what is held of the others?")
    else:
        print("incorrect: no lease is answered: what does the last step read of clause 17?")


def board() -> None:
    """Count what was predicted and what was solved since this notebook was started."""
    tally.show()


def _known(name) -> str:
    """The exercise that is meant: by its name, or by the function or check of that name; "" where none is."""
    name = getattr(name, "name", getattr(name, "__name__", name))
    if name in HELP:
        return name
    near = difflib.get_close_matches(str(name), HELP, 1)
    meant = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(HELP)}"
    print(f"there is no exercise {name!r}; {meant}" if name else f"which exercise? {meant}")
    return ""
