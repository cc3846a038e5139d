"""What every check shares: it runs an answer on a few cases and says what it does.

An exercise holds the right function, wrong ones with the sentence for each, and what may be seen in a result.
An answer that does on every case what the right function does is right, however it is written. One that does
what a wrong function does has made that mistake. For the rest there are sentences about any answer
(`sentences.py`). How an answer is run and compared stands in `answer.py`.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from . import tally
from .answer import fits, run, same, same_shape, untouched
from .sentences import IN_PLACE, difference, kind, no_value, pattern, power, stopped

EMPTY = inspect.Parameter.empty  # a check that was called without an answer
CORRECT, INCORRECT, NOT_ATTEMPTED = "correct", "incorrect", "not attempted"
EXERCISES: dict[str, Exercise | Choice] = {}  # every exercise by its name, in the order of the course
ATTEMPTED: set[str] = set()  # what was answered since Python started


@dataclass(frozen=True)
class Verdict:
    """state: CORRECT, INCORRECT or NOT_ATTEMPTED; message: the mistake, or what was found right; so_far: the
    first of an exercise's growing tests that a wrong answer does not pass."""

    state: str
    message: str = ""
    so_far: str = field(default="", compare=False)

    def __str__(self) -> str:
        said = f"{self.state}: {self.message}" if self.message else self.state
        return f"{said} [{self.so_far}]" if self.so_far else said


@dataclass(frozen=True)
class Exercise:
    """Check a function: `exercise(fn)` prints the verdict, `exercise.verdict(fn)` returns it.

    right: the reference. cases: lists of arguments, copied before each use. mistakes: sentence -> a function
    that makes this mistake. praise: what a right answer has shown. alike(a, b): whether two results count as
    the same. holds: "numbers", "indices" or "booleans". given: the function a learner finds. signs: sentence
    -> sign(result, *case), true where a wrong result shows this mistake; asked after the mistakes. grows:
    what each case asks beyond the one before, where the tests grow with the answer.
    """

    name: str
    right: Callable
    cases: Callable[[], list[tuple]]
    mistakes: dict[str, Callable]
    praise: str
    alike: Callable = same
    holds: str = "numbers"
    given: Callable | None = None
    signs: dict[str, Callable] = field(default_factory=dict)
    grows: tuple[str, ...] = ()

    def __post_init__(self):
        EXERCISES[self.name] = self

    def __call__(self, answer: Callable = EMPTY) -> None:
        _tell(self, answer)

    def verdict(self, answer: Callable) -> Verdict:
        cases = self.cases()
        if untouched(answer, self.given, cases[0]):
            return Verdict(NOT_ATTEMPTED)
        if self.accepts(answer) and not kind(self.holds, [run(answer, case)[0] for case in cases]):
            return Verdict(CORRECT, self.praise)
        return Verdict(INCORRECT, self._mistake(answer, cases), self._so_far(answer, cases))

    def _so_far(self, answer, cases) -> str:
        """The first of the growing tests that an answer does not pass."""
        if not self.grows or not callable(answer) or not fits(answer, cases[0]):
            return ""
        passed = 0
        for case in cases:
            if not self._alike(run(answer, case)[0], self.right(*copy.deepcopy(case))):
                break
            passed += 1
        if passed == len(cases):  # right but for the type of its numbers
            return ""
        return f"test {passed + 1} of {len(cases)}: {self.grows[passed]}"

    def _alike(self, one, other) -> bool:
        try:
            return self.alike(one, other)
        except Exception:  # what cannot be compared is not alike
            return False

    def accepts(self, answer: Callable) -> bool:
        """Whether the answer's results are right on all cases, and no argument has changed."""
        if not callable(answer) or not fits(answer, self.cases()[0]):
            return False
        runs = [(run(answer, case), self.right(*copy.deepcopy(case))) for case in self.cases()]
        return all(not changed and self._alike(result, wanted) for (result, changed), wanted in runs)

    def _mistake(self, answer, cases) -> str:
        """The sentence for a wrong answer."""
        if misuse := self._misuse(answer, cases[0]):
            return misuse
        runs = [run(answer, case) for case in cases]
        given, changed = [result for result, _ in runs], any(changed for _, changed in runs)
        if pair := no_value(given):
            return pair
        wanted = [self.right(*copy.deepcopy(case)) for case in cases]
        right = [self._alike(g, w) for g, w in zip(given, wanted)]
        wrong = [number for number, ok in enumerate(right) if not ok]
        return (
            (wrong and (self._made(given, cases, range(len(cases))) or self._of_another(answer)))
            or stopped(given, cases)
            or (changed and IN_PLACE)
            or (not wrong and kind(self.holds, given))
            or self._made(given, cases, wrong)
            or self._one_of_several(given, wanted)
            or self._seen(answer, given, cases, wrong)
            or (self.grows and wrong and self._made(given, cases, range(wrong[0] + 1)))
            or pattern(given, wanted)
            or kind(self.holds, [g for g, w in zip(given, wanted) if same_shape(g, w)])
            or difference(cases, given, wanted, self._alike)
        )

    def _misuse(self, answer, case) -> str:
        """What keeps the answer from being called."""
        if not callable(answer):
            return (
                f"expected a function, got {type(answer).__name__}: hand over the function itself, "
                "not what it returns"
            )
        if not fits(answer, case):
            names = ", ".join(inspect.signature(self.right).parameters)
            return f"the check calls your function with {len(case)} arguments ({names}), and it takes others"
        return ""

    def _made(self, given, cases, numbers) -> str:
        """The first mistake that gives the answer's results on these cases."""
        for sentence, wrong in self.mistakes.items():
            if all(self._alike(given[number], run(wrong, cases[number])[0]) for number in numbers):
                return sentence
        return ""

    def _of_another(self, answer) -> str:
        for other in EXERCISES.values():
            if isinstance(other, Exercise) and other is not self and other.accepts(answer):
                return f"this is the answer to another exercise, `{other.name}`"
        return ""

    def _one_of_several(self, given, wanted) -> str:
        """Whether the right result is one of several things that are returned together."""
        for number in range(4):
            parts = [list(one)[number : number + 1] if isinstance(one, list) else [] for one in given]
            if all(part and self._alike(part[0], right) for part, right in zip(parts, wanted)):
                return f"you return {len(given[0])} things, and number {number + 1} is right: return it alone"
        return ""

    def _seen(self, answer, given, cases, wrong) -> str:
        """What an answer or its wrong results show."""
        if sentence := power(answer):
            return sentence
        if all(any(same(result, part) for part in case) for result, case in zip(given, cases)):
            return "it returns what it was given, unchanged"
        for sentence, sign in self.signs.items():
            if any(_shows(sign, given[number], cases[number]) for number in wrong):
                return sentence
        return ""


@dataclass(frozen=True)
class Choice:
    """Check a choice: `choice("b")`. right: the letter; why: letter -> what speaks for or against it."""

    name: str
    right: str
    why: dict[str, str]

    def __post_init__(self):
        EXERCISES[self.name] = self

    def __call__(self, answer=EMPTY) -> None:
        _tell(self, answer)

    def verdict(self, answer) -> Verdict:
        if answer is ... or answer is None:
            return Verdict(NOT_ATTEMPTED)
        letters = ", ".join(self.why)
        if isinstance(answer, list | tuple | set) and len(answer) == 1:
            (answer,) = answer
        if isinstance(answer, list | tuple | set | dict):
            return Verdict(INCORRECT, f"one proposal is asked for, you gave {len(answer)}: choose one letter")
        if callable(answer):
            return Verdict(INCORRECT, f'no function here: write one letter of {letters}, as in "a"')
        if not isinstance(answer, str):
            return Verdict(
                INCORRECT, f"{answer!r} is none of {letters}: the proposals have letters, not numbers"
            )
        letter = answer.strip().strip("().:").strip().lower()
        if letter in self.why:
            return Verdict(CORRECT if letter == self.right else INCORRECT, self.why[letter])
        if not letter:
            return Verdict(INCORRECT, f"the answer is empty: write one of {letters}")
        copied = re.findall(rf"(?:^|[\s(])([{''.join(self.why)}])[.):](?=\s|$)", letter)
        if len(copied) == 1 and letter.lstrip("(").startswith(copied[0]):  # with the proposal's own words
            return Verdict(CORRECT if copied[0] == self.right else INCORRECT, self.why[copied[0]])
        words = letter.replace(",", " ").replace("/", " ").replace("+", " ").split()
        if len([word for word in words if word in self.why and len(word) == 1]) > 1:
            return Verdict(INCORRECT, f"{answer!r} names more than one proposal: choose one letter")
        if len(letter) == 1:
            return Verdict(INCORRECT, f"{answer!r} is none of {letters}")
        return Verdict(INCORRECT, f"that is a text, none of {letters}: write the letter alone")


def _tell(exercise: Exercise | Choice, answer) -> None:
    if answer is EMPTY:
        what = f"your function, check.{exercise.name}({exercise.name})"
        what = what if isinstance(exercise, Exercise) else f'a letter, check.{exercise.name}("a")'
        print(f"nothing to check: write in the brackets {what}")
        return
    verdict = exercise.verdict(answer)
    print(verdict)
    if verdict.state != NOT_ATTEMPTED:
        ATTEMPTED.add(exercise.name)
        tally.note(exercise.name, verdict.state == CORRECT)


def _shows(sign: Callable, result, case: tuple) -> bool:
    try:
        return bool(sign(result, *copy.deepcopy(case)))
    except Exception:  # a sign that cannot be looked for is not seen
        return False
