"""As if: whether a wrong answer is the right one for other arguments than those of the tests."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .answer import same_shape

ROWS = {  # what is in each row of an argument
    "row 0": lambda old: old[:1].expand_as(old).clone(),
    "the last row": lambda old: old[-1:].expand_as(old).clone(),
    "the mean over the rows": lambda old: old.mean(0, keepdim=True).expand_as(old).clone(),
    "the row before": lambda old: old.roll(1, 0),
    "the row after": lambda old: old.roll(-1, 0),
}


def _whole(value) -> bool:
    return isinstance(value, int)


def _number(value) -> bool:
    return isinstance(value, int | float)


def _rows(value) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0


NEW = [  # in words, of which arguments, and what takes its place
    ("for `{}` + 1", _whole, lambda old: old + 1),
    ("for `{}` - 1", _whole, lambda old: old - 1),
    ("for twice `{}`", _number, lambda old: 2 * old),
    ("for half of `{}`", _number, lambda old: type(old)(old / 2)),
    *((f"with {what} in place of each row of `{{}}`", _rows, new) for what, new in ROWS.items()),
    ("with zeros in `{}`", _rows, torch.zeros_like),
    *((f"for `{{}}` = {number}", _whole, lambda old, number=number: number) for number in range(4)),
]


def as_if(right: Callable, names: list[str], cases: list, given: list, alike: Callable) -> str:
    """The change of the arguments under which all wrong results, `given` on `cases`, are right; or ""."""
    for what, change in _changes(names, cases[0]):
        made = (_result(right, change, case) for case in cases)
        if all(alike(one, other) and alike(other, one) for one, other in zip(given, made)):
            return f"where it is wrong, it is the right answer {what}"
    return ""


def _result(right: Callable, change: dict[int, Callable], case: tuple):
    given = copy.deepcopy(case)
    try:
        return right(*(change[at](given) if at in change else one for at, one in enumerate(given)))
    except Exception as error:  # not every change makes sense
        return error


def _changes(names: list[str], case: tuple) -> Iterator[tuple[str, dict[int, Callable]]]:
    """Each change in words; and by the number of an argument, what of all arguments takes its place."""
    for at, (name, value) in enumerate(zip(names, case)):
        for what, fits, new in NEW:
            if fits(value):
                yield what.format(name), {at: lambda given, at=at, new=new: new(given[at])}
        for other in range(len(case)):
            if other != at and _of_a_kind(value, case[other]):
                taken = {at: operator.itemgetter(other)}
                yield f"with `{names[other]}` in place of `{name}`", taken
                yield (
                    f"with `{name}` and `{names[other]}` exchanged",
                    taken | {other: operator.itemgetter(at)},
                )


def _of_a_kind(one, other) -> bool:
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other)
    return type(one) is type(other) is int or (isinstance(one, Tensor) and same_shape(one, other))
