"""What every check shares: it runs an answer on a few cases and says what it does.

An exercise holds the right function, wrong ones with the sentence for each, and what may be seen in a result.
Its cases are drawn at every check, until each of these wrong functions shows and none looks like another; a
few more draws follow. An answer that does on every case of every draw what the right function does is right,
however it is written. One that does what a wrong function does has made that mistake. For the rest there are
sentences about any answer (`sentences.py`). A sentence about the answer is said only where every draw on
which it is wrong agrees; else what one case shows is said. `answer.py` says how an answer is run and
compared.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from . import tally
from .answer import container, fits, plain, run, same, same_rows, same_shape, untouched
from .as_if import as_if
from .sentences import IN_PLACE, difference, kind, no_value, not_a_number, pattern, power, stopped

EMPTY = inspect.Parameter.empty  # a check that was called without an answer
CORRECT, INCORRECT, NOT_ATTEMPTED = "correct", "incorrect", "not attempted"
EXERCISES: dict[str, Exercise | Choice] = {}  # every exercise by its name, in the order of the course
NUMBERS: dict[str, float] = {}  # what a cell asks for and does not compute
ATTEMPTED: set[str] = set()  # what was answered since Python started
TRIES = 50  # draws before cases are taken that hide a mistake
MORE = 3  # draws after that, which must agree


class Tried(NamedTuple):
    """What an answer gives on the cases of one draw, what is wanted, which are wrong, by their numbers, and
    whether an argument was changed."""

    cases: list[tuple]
    given: list
    wanted: list
    wrong: list[int]
    changed: bool


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

    right: the reference. cases(draw): lists of arguments, drawn with a torch.Generator and copied before
    each use. mistakes: pairs of a sentence and a function that makes this mistake. praise: what a right
    answer has shown. alike(a, b): whether two results count as the same. holds: "numbers", "indices" or
    "booleans". given: the function a learner finds. signs: sentence -> sign(result, right result, *case),
    true where a wrong result of the right shape shows this mistake; shapes: the same for results of another
    shape. Both are asked after the mistakes. grows: what each case asks beyond the one before, where the
    tests grow with the answer.
    """

    name: str
    right: Callable
    cases: Callable[[torch.Generator], list[tuple]]
    mistakes: list[tuple[str, Callable]]
    praise: str
    alike: Callable = same
    holds: str = "numbers"
    given: Callable | None = None
    signs: dict[str, Callable] = field(default_factory=dict)
    shapes: dict[str, Callable] = field(default_factory=dict)
    grows: tuple[str, ...] = ()

    def __post_init__(self):
        EXERCISES[self.name] = self

    def __call__(self, answer: Callable = EMPTY) -> None:
        _tell(self, answer)

    def verdict(self, answer: Callable, drawn: tuple | None = None) -> Verdict:
        """What is said of an answer, on what `drawn` gave, or else on cases that nobody has seen before."""
        cases, known, more = drawn or self.drawn()
        if untouched(answer, self.given, cases[0]):
            return Verdict(NOT_ATTEMPTED)
        if misuse := self._misuse(answer, cases[0]):
            return Verdict(INCORRECT, misuse)
        draws = [self._tried(answer, one) for one in (cases, *more)]
        bad = [one for one in draws if one.wrong or one.changed or kind(self.holds, one.given)]
        if not bad:
            return Verdict(CORRECT, self.praise + container(answer, self.right, cases[0]))
        first, wrong = bad[0], bad[0].wrong
        message = self._agreed(answer, known if first is draws[0] else [], first, bad[1:])
        if message == stopped(answer, first.given, cases, wrong):
            wrong = [number for number in wrong if isinstance(first.given[number], BaseException)]
        so_far = (
            f"test {wrong[0] + 1} of {len(cases)}: {self.grows[wrong[0]]}" if self.grows and wrong else ""
        )
        return Verdict(INCORRECT, message, so_far)

    def drawn(self, seed: int | None = None) -> tuple[list[tuple], list[tuple[str, list]], list[list[tuple]]]:
        """Cases on which each mistake shows and none looks like another, what each gives on them, and the
        cases of more draws."""
        draw = _generator(seed)
        for _ in range(TRIES):
            cases = self.cases(draw)
            known = [("", self._wanted(cases))]
            for sentence, wrong in self.mistakes:
                results = [run(wrong, case)[0] for case in cases]
                if any(all(map(self._alike, results, others)) for _, others in known):
                    break
                known.append((sentence, results))
            else:
                break
        return cases, known[1:], [self.cases(draw) for _ in range(MORE)]

    def accepts(self, answer: Callable) -> bool:
        """Whether the answer's results are right on drawn cases, and no argument has changed."""
        if not fits(answer, tuple(inspect.signature(self.right).parameters)):
            return False
        draw = _generator()
        one_by_one = (self._tried(answer, [case]) for _ in range(MORE) for case in self.cases(draw))
        return not any(one.wrong or one.changed for one in one_by_one)

    def _tried(self, answer, cases) -> Tried:
        wanted = self._wanted(cases)
        several = isinstance(wanted[0], tuple)  # things of their own, and not the rows of one
        runs, wanted = [run(answer, case, several) for case in cases], [plain(one, several) for one in wanted]
        given, changed = [result for result, _ in runs], any(changed for _, changed in runs)
        wrong = [number for number in range(len(cases)) if not self._alike(given[number], wanted[number])]
        return Tried(cases, given, wanted, wrong, changed)

    def _wanted(self, cases) -> list:
        return [self.right(*copy.deepcopy(case)) for case in cases]

    def _alike(self, one, other) -> bool:
        if isinstance(one, Exception):
            return same(one, other)
        try:
            return self.alike(one, other)
        except Exception:  # what cannot be compared is not alike
            return False

    def _agreed(self, answer, known, first: Tried, others: list[Tried]) -> str:
        """The first sentence about a wrong answer that all these draws say, or that is about one case."""
        return next(
            sentence
            for sentence, of_one_case in self._sentences(answer, known, first)
            if sentence and (of_one_case or all(self._says(answer, sentence, one) for one in others))
        )

    def _says(self, answer, sentence, one: Tried) -> bool:
        """Whether a draw says this sentence, too."""
        known = [
            (what, [run(wrong, case)[0] for case in one.cases])
            for what, wrong in self.mistakes
            if what == sentence
        ]
        return any(said == sentence for said, _ in self._sentences(answer, known, one, first=False))

    def _sentences(self, answer, known, one: Tried, first: bool = True) -> Iterator[tuple[str, bool]]:
        """Sentences for a wrong answer, "" where there is none, and whether one case is enough for each; of
        the first draw, or without what looks the same on all."""
        cases, given, wanted, wrong, changed = one
        yield no_value(given), False
        if not wrong:
            yield IN_PLACE if changed else kind(self.holds, given), True
            return
        yield self._made(known, given, range(len(cases))), False
        yield self._of_another(answer) if first else "", True
        yield stopped(answer, given, cases, wrong[:1]), True
        yield IN_PLACE if changed else "", True
        if self.grows and len(wrong) > 1:  # one may agree by chance
            yield self._made(known, given, wrong), False
        yield self._one_of_several(given, wanted), False
        yield kind(self.holds, [given[number] for number in wrong]), False
        yield self._as_if(cases, given, wrong), False
        yield self._seen(answer, cases, given, wanted, wrong), False
        if self.grows and self.alike is not same_rows:
            yield self._made(known, given, range(wrong[0] + 1)), False
        yield stopped(answer, given, cases, wrong), True
        yield pattern(self.holds, given, wanted), False
        yield difference(cases, given, wanted, wrong[0], self.alike), True

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

    def _made(self, known, given, numbers) -> str:
        """The one mistake that gives the answer's results on these cases."""
        made = {
            sentence
            for sentence, results in known
            if all(self._alike(given[number], results[number]) for number in numbers)
        }
        return made.pop() if len(made) == 1 else ""

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

    def _as_if(self, cases, given, wrong) -> str:
        names = list(inspect.signature(self.right).parameters)
        cases, given = [cases[number] for number in wrong], [given[number] for number in wrong]
        return as_if(self.right, names, cases, given, self._alike)

    def _seen(self, answer, cases, given, wanted, wrong) -> str:
        """What an answer shows, or a wrong result: the first, or where no tests grow the first that shows."""
        if sentence := power(answer):
            return sentence
        if all(any(same(result, part) for part in case) for result, case in zip(given, cases)):
            return "it returns what it was given, unchanged"
        if sentence := not_a_number(given[wrong[0]]):
            return sentence
        for number in wrong[:1] if self.grows else wrong:
            if isinstance(given[number], BaseException):
                continue
            signs = self.signs if same_shape(given[number], wanted[number]) else self.shapes
            for sentence, sign in signs.items():
                if _shows(sign, given[number], wanted[number], cases[number]):
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
            what = f"a {type(answer).__name__} is none of {letters}"
            return Verdict(INCORRECT, f'{what}: write one letter in quotes, as in "a"')
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


def _generator(seed: int | None = None) -> torch.Generator:
    draw = torch.Generator()
    draw.manual_seed(seed) if seed is not None else draw.seed()
    return draw


def _shows(sign: Callable, result, right, case: tuple) -> bool:
    try:
        return bool(sign(result, right, *copy.deepcopy(case)))
    except Exception:  # a sign that cannot be looked for is not seen
        return False
