"""As if: whether a wrong answer is the right one for other arguments than those of the tests."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .answer import same_shape

CONSTANTS = 0, 1, 2, 3
ROWS = {  # what is in each row of an argument
    "row 0": lambda old: old[:1].expand_as(old).clone(),
    "the last row": lambda old: old[-1:].expand_as(old).clone(),
    "the mean over the rows": lambda old: old.mean(0, keepdim=True).expand_as(old).clone(),
    "the row before": lambda old: old.roll(1, 0),
    "the row after": lambda old: old.roll(-1, 0),
}


def as_if(right: Callable, names: list[str], cases: list, given: list, alike: Callable) -> str:
    """The change of the arguments under which all wrong results, `given` on `cases`, are right; or ""."""
    for what, change in _changes(names, cases[0]):
        made = (_result(right, change, case) for case in cases)
        if all(alike(one, other) and alike(other, one) for one, other in zip(given, made)):
            return f"where it is wrong, it is the right answer {what}"
    return ""


def _result(right: Callable, change: Callable, case: tuple):
    given = list(copy.deepcopy(case))
    try:
        change(given)
        return right(*given)
    except Exception as error:  # not every change makes sense
        return error


def _changes(names: list[str], case: tuple) -> Iterator[tuple[str, Callable]]:
    """Each change, in words, and a function that makes it in a list of arguments."""
    for at, (name, value) in enumerate(zip(names, case)):
        if isinstance(value, int):
            yield f"for `{name}` + 1", _put(at, lambda old: old + 1)
            yield f"for `{name}` - 1", _put(at, lambda old: old - 1)
        if isinstance(value, int | float):
            yield f"for twice `{name}`", _put(at, lambda old: 2 * old)
            yield f"for half of `{name}`", _put(at, lambda old: type(old)(old / 2))
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():
            for what, new in ROWS.items():
                yield f"with {what} in place of each row of `{name}`", _put(at, new)
            yield f"with zeros in `{name}`", _put(at, torch.zeros_like)
        for other in range(len(case)):
            if other != at and _of_a_kind(value, case[other]):
                yield f"with `{names[other]}` in place of `{name}`", _take(at, other)
                if at < other:
                    yield f"with `{name}` and `{names[other]}` exchanged", _exchange(at, other)
    for at, (name, value) in enumerate(zip(names, case)):
        if isinstance(value, int):
            for number in CONSTANTS:
                yield f"for `{name}` = {number}", _put(at, lambda old, number=number: number)


def _of_a_kind(one, other) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other)
    return type(one) is type(other) is int or (isinstance(one, Tensor) and same_shape(one, other))


def _put(at: int, new: Callable) -> Callable:
    def change(given: list) -> None:
        given[at] = new(given[at])

    return change


def _take(at: int, other: int) -> Callable:
    def change(given: list) -> None:
        given[at] = given[other]

    return change


def _exchange(at: int, other: int) -> Callable:
    def change(given: list) -> None:
        given[at], given[other] = given[other], given[at]

    return change
