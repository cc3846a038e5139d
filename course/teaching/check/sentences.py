"""Sentences about any wrong answer: an error, a type, a sign, a factor, an order, a shape.

They are asked after the mistakes that an exercise knows by name. Each function returns a sentence, or "".
"""

from __future__ import annotations

import dis
import linecache
import re
import traceback
from collections.abc import Callable

import torch
from torch import Tensor

from .answer import same, same_members, same_rows

FEW = 8  # numbers that a sentence shows as they are
IN_PLACE = "your function changes its argument in place: what the caller holds is not the same any more"


def no_value(results: list) -> str:
    """What is wrong with results that are no values."""
    if any(type(result).__module__ == "torch.return_types" for result in results):
        return "torch gives back two tensors here, values and indices: take the one you need (.indices)"
    if any(callable(result) for result in results):
        return "it returns a function: are the brackets of a call missing?"
    if all(result is None for result in results):
        return "it returns nothing: is a `return` missing, or did you print the result?"
    if any(result is None for result in results):
        return "it returns nothing in some of the tests: does every way through it end in a `return`?"
    return ""


def not_a_number(result) -> str:
    """What there is to say of a result that holds NaN."""
    if isinstance(result, Tensor) and result.isnan().any():
        return (
            "the result holds NaN: of 0 / 0, of infinity minus infinity, "
            "or of the root or logarithm of a negative number"
        )
    return ""


def stopped(answer: Callable, results: list, cases: list, numbers) -> str:
    """A sentence about the first of these cases that raised an error."""
    raised = [number for number in numbers if isinstance(results[number], BaseException)]
    return _stops(answer, results[raised[0]], cases[raised[0]]) if raised else ""


def kind(holds: str, results: list) -> str:
    """What is wrong with the type of the results' numbers; nothing for one that is right."""
    for result in results:
        if holds == "indices" and isinstance(result, Tensor) and result.dtype == torch.bool:
            return "these are True and False: return the numbers of the places that are True"
        if holds == "indices" and isinstance(result, Tensor) and result.is_floating_point():
            return "whole numbers are asked for, and you return floats (a float cannot be an index)"
        if isinstance(result, Tensor) and not result.numel():  # of no type
            continue
        if holds == "booleans" and isinstance(result, Tensor) and result.dtype != torch.bool:
            if set(result.unique().tolist()) <= {0, 1}:
                return "a mask holds True and False; 0 and 1 used as an index would pick slots 0 and 1"
            return "your result holds numbers; asked for is a mask of True and False"
    return ""


_ADVICE = {
    UnboundLocalError: "your function uses this name before it gives it a value",
    NameError: "this name is not defined: a typo, or a variable of another cell?",
    KeyError: "a dict has no entry of this name yet: .get(name, start) or .setdefault(name, start) gives one",
    IndexError: "an index is beyond the ends: 0 is the first, and -1 is the last",
    ZeroDivisionError: "a divisor becomes 0 here",
    RecursionError: "your function calls itself without an end",
    AttributeError: "the value has no such method: is it a number or a list where you expect a tensor?",
    TypeError: "this operation does not go with values of this type: look at what each name holds",
    SystemExit: "a function returns; it does not leave Python",
    StopIteration: "something was empty",
    NotImplementedError: "a part of your function is not written yet",
}


_WORDS = {  # part of what Python or torch says -> advice
    "torch.return_types.": "torch gives back two tensors here, values and indices: take the one you need "
    "(.values or .indices)",
    "index k out of range": "topk is asked for more numbers than there are, or for fewer than none",
    "shape of the mask": "as an index a mask needs the shape of the tensor: masked_fill spreads it",
    "from empty": "something was empty",
    "'Tensor' object has no": "a tensor has nothing of this name: a typo, or a name of lists or arrays?",
    "'NoneType' object": "something is None here: a start without a value, or a missing `return`?",
    " missing ": "the call lacks an argument: softmax, for one, needs dim",
    "tuple of Tensors": "torch.cat and torch.stack take the tensors in a list: torch.cat([a, b], dim=...)",
    "'range' and 'range'": "ranges cannot be added, lists can: list(range(...)) + list(range(...))",
    "'int' object is not iterable": "one number cannot be looked through: are there fewer dimensions?",
    "module 'torch' has no": "torch has no function of this name",
    "numel() == 0": "the tensor is empty here",
    "non-zero size": "the tensor is empty here",
    "Boolean value of Tensor": "an `if` asks for one True or False: .any() or .all() makes one of many",
    "cannot be converted to Scalar": "one number is expected here, and the tensor holds more",
    "Dimension out of range": "the tensor has fewer dimensions than you expect: print its shape",
    "too many indices": "the tensor has fewer dimensions than you expect: print its shape",
    "used as indices": "a float cannot be an index: .long() makes whole numbers",
    "same dtype": "the tensors hold numbers of different types: convert one of them, as with .float()",
    "but found": "the tensors hold numbers of different types: convert one of them, as with .float()",
    "not implemented for": "torch does not do this with numbers of this type",
}


def _stops(answer: Callable, error: BaseException, case: tuple) -> str:
    """A sentence about an answer that raised an error."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    advice = next((why for part, why in _WORDS.items() if part in text), "")
    if not advice:
        advice = next((why for kind, why in _ADVICE.items() if type(error) is kind), "")
    if not advice:
        advice = next((why for kind, why in _ADVICE.items() if isinstance(error, kind)), "")
    where = _line(answer, error) or _asked(case)
    return f"it stops with {type(error).__name__}: {text}{where}" + (f"; {advice}" if advice else "")


def _line(answer: Callable, error: BaseException) -> str:
    """` in `the line`, where q is [2, 3, 16]`: the answer's line that raised an error, and its tensors."""
    code = getattr(answer, "__code__", None)
    steps = [step for step in traceback.walk_tb(error.__traceback__) if code]
    steps = [step for step in steps if step[0].f_code.co_filename == code.co_filename]
    if not steps or not (line := linecache.getline(code.co_filename, steps[-1][1]).strip()):
        return ""
    shapes = [
        f"{name} is {_shape(value)}"
        for name, value in steps[-1][0].f_locals.items()
        if isinstance(value, Tensor) and re.search(rf"\b{name}\b", line)
    ]
    return f" in `{line}`" + (f", where {' and '.join(shapes)}" if shapes else "")


def power(answer: Callable) -> str:
    """What is wrong with a function that uses `^`."""
    code = getattr(answer, "__code__", None)
    used = code is not None and any(step.argrepr == "^" for step in dis.get_instructions(code))
    return "`^` is no power in Python: write ** (2**3 is 8)" if used else ""


def _asked(case: tuple) -> str:
    """` for (...)`: a case's arguments, tensors by their shapes."""
    return f" for ({', '.join(map(_argument, case))})"


def _argument(value) -> str:
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)}"
    return value.__name__.strip("_") if callable(value) else _short(value)


def pattern(holds: str, given: list, wanted: list) -> str:
    """What the same way of being wrong in all cases has in common: a sign, a factor, a shift, an order."""
    if not all(isinstance(one, Tensor) for one in given + wanted):
        return ""
    given, wanted = [one.double() for one in given], [one.double() for one in wanted]
    if any(g.shape != w.shape for g, w in zip(given, wanted)):
        if all(g.numel() == w.numel() and same(g.flatten(), w.flatten()) for g, w in zip(given, wanted)):
            return f"these are the right numbers in shape {_shape(given[0])}, expected {_shape(wanted[0])}"
        if all(g.dim() == w.dim() == 2 and same(g.T, w) for g, w in zip(given, wanted)):
            return "rows and columns are exchanged"
        return ""
    one, other = torch.cat([g.flatten() for g in given]), torch.cat([w.flatten() for w in wanted])
    if not one.any():
        return "every number is 0"
    if same(one, -other):
        return "every number has the wrong sign"
    if same(one - other, (one - other)[:1].expand_as(one)):
        by = (one - other)[0].item()
        return f"off by {_number(abs(by))}: every number is too {'large' if by > 0 else 'small'}"
    nonzero = other != 0
    if nonzero.any() and same(one[~nonzero], other[~nonzero]):
        ratio = one[nonzero] / other[nonzero]
        if torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4):
            return f"a factor is wrong: every number is {_number(ratio[0].item())} times what it should be"
    if holds != "booleans" and all(same_members(g, w) for g, w in zip(given, wanted)):
        return "these are the right numbers in the wrong order"
    return ""


def _number(value: float) -> str:
    return "one" if value == 1 else f"{value:.4g}"


def _shape(value: Tensor) -> str:
    return str(list(value.shape))


def difference(cases, given, wanted, number, alike) -> str:
    """What a wrong case shows: another kind of thing, another shape, or another value."""
    case, one, other = cases[number], given[number], wanted[number]
    test = f"test {number + 1} of {len(cases)}{_asked(case)}"
    if not isinstance(one, type(other)):
        return f"it returns {_what(one)}, expected {_what(other)}"
    if (
        isinstance(other, list)
        and len(one) == len(other)
        and all(isinstance(part, Tensor) for part in one + other)
    ):
        at = next((at for at, pair in enumerate(zip(one, other)) if not same(*pair)), 0)
        what = difference(cases, {number: one[at]}, {number: other[at]}, number, alike)
        return f"of the {len(one)} things that you return number {at + 1} is wrong: {what}"
    if isinstance(other, Tensor) and one.shape != other.shape:
        return f"the result has shape {_shape(one)}, expected {_shape(other)}{_asked(case)}"
    if alike is same_rows:
        return f"{test}: {_other_members(one, other)}"
    if isinstance(other, Tensor) and other.numel() > FEW:
        return f"{test}: {first_wrong(one, other)}"
    return f"{test}: got {_short(one)}, expected {_short(other)}"


def _other_members(one: Tensor, other: Tensor) -> str:
    """Which numbers the first wrong row holds, and which it should."""
    rows = enumerate(zip(one.tolist(), other.tolist()))
    number, mine, right = next(
        (n, *map(sorted, pair)) for n, pair in rows if sorted(pair[0]) != sorted(pair[1])
    )
    return f"row {number} holds {_short(mine)}, expected {_short(right)} (in any order)"


def first_wrong(one: Tensor, other: Tensor) -> str:
    """Where a result is wrong first, and in how many places; all numbers would be a dump."""
    wrong = ~torch.isclose(one.double(), other.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
    if not wrong.any():  # compared as sets or rankings
        return "the numbers are right, their order is not"
    place = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {wrong.numel()} numbers are wrong, the first at {list(place)}: it is"
        f" {_short(one[place])}, expected {_short(other[place])}"
    )


def _what(value) -> str:
    if isinstance(value, list):
        return f"{len(value)} different things in a list or tuple"
    return "one tensor, list or number" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _short(value) -> str:
    plain = value.tolist() if isinstance(value, Tensor) else value
    text = f"{plain:.6g}" if isinstance(plain, float) else repr(plain)
    return text if len(text) <= 60 else text[:57] + "..."
