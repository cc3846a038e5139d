"""What every check shares: it runs an answer on a few cases and says what it does.

An exercise holds the right function, wrong ones with the sentence for each, and what may be seen in a result.
An answer that does on every case what the right function does is right, however it is written. One that does
what a wrong function does has made that mistake. For the rest there are sentences about any answer: an error,
an argument changed in place, a float for an index, a sign, a factor, an order, a shape.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

CORRECT, INCORRECT, NOT_ATTEMPTED = "correct", "incorrect", "not attempted"
EXERCISES: dict[str, Exercise | Choice] = {}  # every exercise by its name, in the order of the course
ATTEMPTED: set[str] = set()  # what was answered since Python started


@dataclass(frozen=True)
class Verdict:
    """state: CORRECT, INCORRECT or NOT_ATTEMPTED; message: the mistake, or what was found right."""

    state: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state


def same(one, other, tolerance: float = 1e-5) -> bool:
    """Equal values: of the same shape, within the tolerance; tensors, arrays, lists and numbers alike."""
    one, other = plain(one), plain(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape and not one.numel() == other.numel() == 1:
            return False
        return torch.allclose(
            one.double().flatten(), other.double().flatten(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other))
    return type(one) is type(other) and (isinstance(one, Exception) or bool(one == other))


def same_order(one, other) -> bool:
    """The same ranking along the last dimension, whatever the scores are."""
    one, other = plain(one), plain(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return same(one, other)
    if one.shape != other.shape or one.isnan().any():
        return False
    return not one.dim() or torch.equal(
        one[..., None] > one[..., None, :], other[..., None] > other[..., None, :]
    )


def same_members(one, other) -> bool:
    """The same numbers, in any order."""
    one, other = plain(one), plain(other)
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return same(one, other)
    return same(one.flatten().sort().values, other.flatten().sort().values)


@dataclass(frozen=True)
class Exercise:
    """Check a function: `exercise(fn)` prints the verdict, `exercise.verdict(fn)` returns it.

    right: the reference. cases: lists of arguments, copied before each use. mistakes: sentence -> a function
    that makes this mistake. praise: what a right answer has shown. alike(a, b): whether two results count as
    the same. holds: "numbers", "indices" or "booleans". given: the function a learner finds. signs: sentence
    -> sign(result, *case), true where a wrong result shows this mistake; asked after the mistakes.
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

    def __post_init__(self):
        EXERCISES[self.name] = self

    def __call__(self, answer: Callable) -> None:
        _tell(self, answer)

    def verdict(self, answer: Callable) -> Verdict:
        cases = self.cases()
        if untouched(answer, self.given, cases[0]):
            return Verdict(NOT_ATTEMPTED)
        if self.accepts(answer) and not _kind(self.holds, [_run(answer, case)[0] for case in cases]):
            return Verdict(CORRECT, self.praise)
        return Verdict(INCORRECT, self._mistake(answer, cases))

    def _alike(self, one, other) -> bool:
        try:
            return self.alike(one, other)
        except Exception:  # what cannot be compared is not alike
            return False

    def accepts(self, answer: Callable) -> bool:
        """Whether the answer's results are right on all cases, and no argument has changed."""
        if not callable(answer) or not _fits(answer, self.cases()[0]):
            return False
        runs = [(_run(answer, case), self.right(*copy.deepcopy(case))) for case in self.cases()]
        return all(not changed and self._alike(result, wanted) for (result, changed), wanted in runs)

    def _mistake(self, answer, cases) -> str:
        """The sentence for a wrong answer."""
        if misuse := self._misuse(answer, cases[0]):
            return misuse
        runs = [_run(answer, case) for case in cases]
        given, changed = [result for result, _ in runs], any(changed for _, changed in runs)
        if pair := _no_value(given):
            return pair
        wanted = [self.right(*copy.deepcopy(case)) for case in cases]
        right = [self._alike(g, w) for g, w in zip(given, wanted)]
        wrong = [number for number, ok in enumerate(right) if not ok]
        return (
            (wrong and (self._made(given, cases, range(len(cases))) or self._of_another(answer)))
            or _stopped(given, cases)
            or (changed and IN_PLACE)
            or (not wrong and _kind(self.holds, given))
            or self._made(given, cases, wrong)
            or self._seen(answer, given, cases, wrong)
            or _pattern(given, wanted)
            or _kind(self.holds, given)
            or _difference(cases, given, wanted, self._alike)
        )

    def _misuse(self, answer, case) -> str:
        """What keeps the answer from being called."""
        if not callable(answer):
            return (
                f"expected a function, got {type(answer).__name__}: hand over the function itself, "
                "not what it returns"
            )
        if not _fits(answer, case):
            names = ", ".join(inspect.signature(self.right).parameters)
            return f"the check calls your function with {len(case)} arguments ({names}), and it takes others"
        return ""

    def _made(self, given, cases, numbers) -> str:
        """The first mistake that gives the answer's results on these cases."""
        for sentence, wrong in self.mistakes.items():
            if all(self._alike(given[number], _run(wrong, cases[number])[0]) for number in numbers):
                return sentence
        return ""

    def _of_another(self, answer) -> str:
        for other in EXERCISES.values():
            if isinstance(other, Exercise) and other is not self and other.accepts(answer):
                return f"this is the answer to another exercise, `{other.name}`"
        return ""

    def _seen(self, answer, given, cases, wrong) -> str:
        """What an answer or its wrong results show."""
        if _power(answer):
            return "`^` is no power in Python: write ** (h**2)"
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

    def __call__(self, answer) -> None:
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
        words = letter.replace(",", " ").replace("/", " ").replace("+", " ").split()
        if len([word for word in words if word in self.why and len(word) == 1]) > 1:
            return Verdict(INCORRECT, f"{answer!r} names more than one proposal: choose one letter")
        if len(letter) == 1:
            return Verdict(INCORRECT, f"{answer!r} is none of {letters}")
        return Verdict(INCORRECT, f"that is a text, none of {letters}: write the letter alone")


def _tell(exercise: Exercise | Choice, answer) -> None:
    verdict = exercise.verdict(answer)
    if verdict.state != NOT_ATTEMPTED:
        ATTEMPTED.add(exercise.name)
    print(verdict)


# What an answer is.


def untouched(answer, given: Callable | None, case: tuple) -> bool:
    """Whether the answer is a stub: nothing, a body without a line of its own, or the given function."""
    if answer is ... or answer is None:
        return True
    code = getattr(answer, "__code__", None)
    if code is None:
        return False
    if given is not None and _instructions(code) == _instructions(given.__code__):
        return True
    works = ("LOAD_FAST", "STORE", "BINARY", "COMPARE", "LOAD_DEREF")
    if set(code.co_names) - {"NotImplementedError"} or any(
        step.opname.startswith(works) for step in dis.get_instructions(code)
    ):
        return False
    result = _run(answer, case)[0] if _fits(answer, case) else 0
    return result is None or result is ... or isinstance(result, NotImplementedError)


def _instructions(code) -> list:
    """What a function loads, computes and compares, in order; where it stands leaves no trace."""
    kinds = ("LOAD_", "STORE_", "BINARY_", "COMPARE_", "CONTAINS_", "UNARY_", "RETURN_")
    return [
        (
            step.opname.replace("LOAD_METHOD", "LOAD_ATTR"),
            _instructions(step.argval) if inspect.iscode(step.argval) else step.argval,
        )
        for step in dis.get_instructions(code)
        if step.opname.startswith(kinds) and "<locals>" not in str(step.argval)
    ]


def _fits(answer: Callable, case: tuple) -> bool:
    """Whether the function takes a case's arguments."""
    try:
        inspect.signature(answer).bind(*case)
    except TypeError:
        return False
    except ValueError:  # written in C: it does not say
        return True
    return True


def _run(function: Callable, case: tuple) -> tuple:
    """(the result, as plain() makes it, or the error; whether an argument was changed)."""
    arguments = copy.deepcopy(case)
    try:
        result = function(*arguments)
        result = result if result is None or result is ... else plain(result)
    except (Exception, SystemExit) as error:
        result = error
    return result, not all(same(one, other) for one, other in zip(arguments, case))


def plain(value):
    """A tensor of whatever holds numbers (array, list, range, set, generator); else itself, or a list."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value if value.layout == torch.strided else value.to_dense()
        return f"complex {value}" if value.is_complex() else value
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "bifu":
        return torch.as_tensor(np.array(value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if type(value).__module__ == "torch.return_types":  # values and indices, a pair
        return value
    if isinstance(value, set | frozenset):
        value = sorted(value, key=lambda one: (isinstance(one, str), one))
    if isinstance(value, np.ndarray | Iterable) and not isinstance(value, str | bytes | dict):
        parts = [plain(part) for part in value]
        if not all(isinstance(part, Tensor) and part.shape == parts[0].shape for part in parts):
            return parts
        if any(part.is_floating_point() for part in parts):
            parts = [part.double() for part in parts]
        return torch.stack(parts) if parts else torch.tensor([], dtype=torch.long)
    return value


# Sentences about any answer.

IN_PLACE = "your function changes its argument in place: what the caller holds is not the same any more"


def _no_value(results: list) -> str:
    """What is wrong with results that are no values."""
    if any(type(result).__module__ == "torch.return_types" for result in results):
        return "torch gives back two tensors here, values and indices: take the one you need (.indices)"
    if any(callable(result) for result in results):
        return "it returns a function: are the brackets of a call missing?"
    if all(result is None for result in results):
        return "it returns nothing: is a `return` missing, or did you print the result?"
    return ""


def _stopped(results: list, cases: list) -> str:
    """A sentence about the first case that raised an error."""
    return next((_stops(r, case) for r, case in zip(results, cases) if isinstance(r, BaseException)), "")


def _kind(holds: str, results: list) -> str:
    """What is wrong with the type of the results' numbers; nothing for one that is right."""
    for result in results:
        if holds == "indices" and isinstance(result, Tensor) and result.is_floating_point():
            return "these are indices: whole numbers, not floats (a float cannot index a tensor)"
        if holds == "booleans" and isinstance(result, Tensor) and result.dtype != torch.bool:
            return "a mask holds True and False; 0 and 1 used as an index would pick slots 0 and 1"
    return ""


_ADVICE = {
    NameError: "this name is not defined: a typo, or a variable of another cell?",
    IndexError: "an index lies outside: indices start at 0, and -1 is the last",
    ZeroDivisionError: "a divisor becomes 0 here",
    RecursionError: "your function calls itself without an end",
    AttributeError: "the value has no such method: is it a number or a list where you expect a tensor?",
    TypeError: "this operation does not go with values of this type: look at what each name holds",
    SystemExit: "a function returns; it does not leave Python",
    StopIteration: "something was empty",
    RuntimeError: "the tensors do not go together: print their shapes before this line",
    NotImplementedError: "torch does not do this with numbers of this type",
}


def _stops(error: BaseException, case: tuple) -> str:
    """A sentence about an answer that raised an error."""
    text = (str(error).strip().splitlines() or [""])[0]
    advice = next((why for kind, why in _ADVICE.items() if type(error) is kind), "")
    if not advice:
        advice = next((why for kind, why in _ADVICE.items() if isinstance(error, kind)), "")
    return f"it stops with {type(error).__name__}: {text}{_asked(case)}" + (f"; {advice}" if advice else "")


def _power(answer: Callable) -> bool:
    """Whether a function uses `^`."""
    code = getattr(answer, "__code__", None)
    return code is not None and any(step.argrepr == "^" for step in dis.get_instructions(code))


def _asked(case: tuple) -> str:
    """` for (...)`: a case's arguments, tensors by their shapes."""
    shown = (f"tensor {list(p.shape)}" if isinstance(p, Tensor) else repr(p) for p in case)
    return f" for ({', '.join(shown)})"


def _shows(sign: Callable, result, case: tuple) -> bool:
    try:
        return bool(sign(result, *copy.deepcopy(case)))
    except Exception:  # a sign that cannot be looked for is not seen
        return False


def _pattern(given: list, wanted: list) -> str:
    """What the same way of being wrong in all cases has in common: a sign, a factor, a shift, an order."""
    wanted = [plain(one) for one in wanted]
    if not all(isinstance(one, Tensor) for one in given + wanted):
        return ""
    given, wanted = [one.double() for one in given], [one.double() for one in wanted]
    if any(one.isnan().any() for one in given):
        return "the result holds NaN: something is divided by zero, or infinity is taken from infinity"
    if any(g.shape != w.shape for g, w in zip(given, wanted)):
        if all(g.numel() == w.numel() and same(g.flatten(), w.flatten()) for g, w in zip(given, wanted)):
            return f"the right numbers in shape {_shape(given[0])}, expected {_shape(wanted[0])}"
        if all(g.dim() == w.dim() == 2 and same(g.T, w) for g, w in zip(given, wanted)):
            return "rows and columns are exchanged"
        return ""
    one, other = torch.cat([g.flatten() for g in given]), torch.cat([w.flatten() for w in wanted])
    if not one.any():
        return "every number is 0"
    if same(one, -other):
        return "the sign is turned around"
    if same(one - other, (one - other)[:1].expand_as(one)):
        by = (one - other)[0].item()
        return f"off by {_number(abs(by))}: every number is too {'large' if by > 0 else 'small'}"
    nonzero = other != 0
    if nonzero.any() and same(one[~nonzero], other[~nonzero]):
        ratio = one[nonzero] / other[nonzero]
        if torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4):
            return f"a factor is wrong: every number is {_number(ratio[0].item())} times what it should be"
    if all(same_members(g, w) for g, w in zip(given, wanted)):
        return "the right numbers in the wrong order"
    return ""


def _number(value: float) -> str:
    return "one" if value == 1 else f"{value:.4g}"


def _shape(value: Tensor) -> str:
    return str(list(value.shape))


def _difference(cases, given, wanted, alike) -> str:
    """What the first wrong case shows: another shape, or another value."""
    for number, (case, one, other) in enumerate(zip(cases, given, wanted), 1):
        if alike(one, other):
            continue
        other = plain(other)
        if not isinstance(one, type(other)):
            return f"it returns {_what(one)}, expected {_what(other)}"
        if isinstance(other, Tensor) and one.shape != other.shape:
            return f"the result has shape {_shape(one)}, expected {_shape(other)}{_asked(case)}"
        if isinstance(other, Tensor) and other.numel() > 20:
            worst = (one.double() - other.double()).abs().max().item()
            return f"case {number} of {len(cases)}: the largest difference is {worst:.3g}"
        return f"case {number} of {len(cases)}{_asked(case)}: got {_short(one)}, expected {_short(other)}"
    return "the results differ"


def _what(value) -> str:
    if isinstance(value, list):
        return f"a list of {len(value)} different things"
    return "one tensor, list or number" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _short(value) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 60 else text[:57] + "..."
