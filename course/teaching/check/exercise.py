"""What every check shares: it compares an answer with the right one and with answers that are often given.

An exercise knows the right function and a few wrong ones, each with the sentence that helps. A learner's
function that does on every case what a wrong one does has made that mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

CORRECT, INCORRECT, NOT_ATTEMPTED = "correct", "incorrect", "not attempted"


@dataclass(frozen=True)
class Verdict:
    """state: CORRECT, INCORRECT or NOT_ATTEMPTED; message: the mistake, or what was found right."""

    state: str
    message: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.message}" if self.message else self.state


@dataclass(frozen=True)
class Exercise:
    """Check a function: `exercise(fn)` prints the verdict, `exercise.verdict(fn)` returns it.

    right: the reference. cases: lists of arguments, each copied before use. mistakes: sentence -> a function
    that makes this mistake. praise: what a right answer has shown. tolerance: largest difference allowed
    between tensors or numbers.
    """

    name: str
    right: Callable
    cases: Callable[[], list[tuple]]
    mistakes: dict[str, Callable] = field(default_factory=dict)
    praise: str = ""
    tolerance: float = 1e-5

    def __call__(self, answer: Callable) -> None:
        print(self.verdict(answer))

    def verdict(self, answer: Callable) -> Verdict:
        if answer is ... or answer is None:
            return Verdict(NOT_ATTEMPTED)
        if not callable(answer):
            return Verdict(INCORRECT, f"expected a function, got {type(answer).__name__}")
        cases = self.cases()
        wanted = [self.right(*copy.deepcopy(case)) for case in cases]
        given = []
        for case in cases:
            try:
                given.append(answer(*copy.deepcopy(case)))
            except NotImplementedError:
                return Verdict(NOT_ATTEMPTED)
            except Exception as error:
                given.append(error)
        if all(one is None or one is ... for one in given):
            return Verdict(NOT_ATTEMPTED)
        if all(same(g, w, self.tolerance) for g, w in zip(given, wanted)):
            return Verdict(CORRECT, self.praise)
        for sentence, wrong in self.mistakes.items():
            if all(same(g, _try(wrong, case), self.tolerance) for g, case in zip(given, cases)):
                return Verdict(INCORRECT, sentence)
        return Verdict(INCORRECT, _difference(cases, given, wanted, self.tolerance))


@dataclass(frozen=True)
class Choice:
    """Check a choice: `choice("b")`. right: the letter; why: letter -> what speaks for or against it."""

    name: str
    right: str
    why: dict[str, str]

    def __call__(self, answer) -> None:
        print(self.verdict(answer))

    def verdict(self, answer) -> Verdict:
        if answer is ... or answer is None:
            return Verdict(NOT_ATTEMPTED)
        letter = str(answer).strip().lower()
        if letter not in self.why:
            return Verdict(INCORRECT, f"{answer!r} is none of {', '.join(self.why)}")
        return Verdict(CORRECT if letter == self.right else INCORRECT, self.why[letter])


def same(one, other, tolerance: float) -> bool:
    """Equal values: tensors of the same shape, numbers, or sequences of them, within the tolerance."""
    if isinstance(one, Exception) or isinstance(other, Exception):
        return type(one) is type(other)
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        try:
            one, other = torch.as_tensor(one), torch.as_tensor(other)
        except (TypeError, ValueError, RuntimeError):
            return False
        return one.shape == other.shape and torch.allclose(
            one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other))
    try:
        return abs(float(one) - float(other)) <= tolerance * max(1.0, abs(float(other)))
    except (TypeError, ValueError):
        return one == other


def _try(function: Callable, case: tuple):
    try:
        return function(*copy.deepcopy(case))
    except Exception as error:
        return error


def _difference(cases, given, wanted, tolerance: float) -> str:
    """What the first wrong case shows: an error, another shape, or another value."""
    for number, (case, one, other) in enumerate(zip(cases, given, wanted), 1):
        if same(one, other, tolerance):
            continue
        asked = ", ".join(repr(part) for part in case)
        asked = f" ({asked})" if len(asked) <= 40 else ""  # not for tensors
        if isinstance(one, Exception):
            return f"it stops with {type(one).__name__}: {one}"
        if isinstance(other, Tensor) and isinstance(one, Tensor) and one.shape != other.shape:
            return f"the result has shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        if isinstance(other, Tensor) and isinstance(one, Tensor):
            worst = (one.double() - other.double()).abs().max().item()
            return f"case {number} of {len(cases)}: the largest difference is {worst:.3g}"
        return f"case {number} of {len(cases)}{asked}: got {_short(one)}, expected {_short(other)}"
    return "the results differ"


def _short(value) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 60 else text[:57] + "..."
