"""What an answer is: how it is run, what it gives back, and when two results count as the same."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor


def same(one, other, tolerance: float = 1e-5) -> bool:
    """Equal values: of the same shape, within the tolerance; tensors, arrays, lists and numbers alike."""
    one, other = plain(one), plain(other)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype == other.dtype and torch.equal(one, other):
            return True
        if one.shape != other.shape and not one.numel() == other.numel() == 1:
            return False
        return torch.allclose(
            one.double().flatten(), other.double().flatten(), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(same(a, b, tolerance) for a, b in zip(one, other))
    return type(one) is type(other) and (
        str(one) == str(other) if isinstance(one, Exception) else bool(one == other)
    )


def same_shape(one, other) -> bool:
    """Tensors of the same shape, or as many of them in a list, one by one."""
    one, other = plain(one), plain(other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_shape, one, other))
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape


def same_rows(one, other) -> bool:
    """The same numbers in every row, in any order."""
    one, other = plain(one), plain(other)
    return same_shape(one, other) and same(one.double().sort(-1).values, other.double().sort(-1).values)


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


def weights_of(out: Tensor, values: Tensor) -> Tensor | None:
    """The weights `[..., n, tokens]` that make `out` `[..., n, d]` of `values` `[..., tokens, d]`, or None if
    no weights do; d must be at least the number of tokens."""
    values, out = values.double(), out.double()
    if not out.isfinite().all():
        return None
    weights = torch.linalg.lstsq(values.mT, out.mT).solution.mT
    return weights if same(weights @ values, out, 1e-4) else None


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
    result = run(answer, case)[0] if fits(answer, case) else 0
    return result is None or result is ... or isinstance(result, NotImplementedError)


def _instructions(code) -> list:
    """What a function loads, computes, compares and decides, in order, wherever in a file it is."""
    kinds = "LOAD_ STORE_ BINARY_ COMPARE_ CONTAINS_ UNARY_ RETURN_ POP_JUMP_ JUMP_IF_"
    return [
        (
            step.opname.replace("LOAD_METHOD", "LOAD_ATTR"),
            _instructions(step.argval)
            if inspect.iscode(step.argval)
            else "JUMP" in step.opname or step.argval,
        )
        for step in dis.get_instructions(code)
        if step.opname.startswith(tuple(kinds.split())) and "<locals>" not in str(step.argval)
    ]


def fits(answer: Callable, case: tuple) -> bool:
    """Whether the function takes a case's arguments."""
    try:
        inspect.signature(answer).bind(*case)
    except TypeError:
        return False
    except ValueError:  # written in C: it does not say
        return True
    return True


def run(function: Callable, case: tuple, several: bool = False) -> tuple:
    """(the result, as plain() makes it, or the error; whether an argument was changed)."""
    arguments = copy.deepcopy(case)
    try:
        result = function(*arguments)
        result = result if result is None or result is ... else plain(result, several)
    except (Exception, SystemExit) as error:
        result = error
    return result, not all(same(one, other) for one, other in zip(arguments, case))


def container(answer: Callable, right: Callable, case: tuple) -> str:
    """What there is to say of a right answer in a list or generator, where the next line wants another."""
    given, wanted = (function(*copy.deepcopy(case)) for function in (answer, right))
    name = f". Yours is a {type(given).__name__}"
    if isinstance(wanted, Tensor) and not isinstance(given, Tensor):
        return f"{name}, and the lines below compute with a tensor: return one"
    return f"{name}, which can be read once: return a list" if isinstance(given, Iterator) else ""


def plain(value, several: bool = False):
    """A tensor of whatever holds numbers (array, list, range, set, generator); else itself, or a list.
    several: a list of the things in it, also where their shapes are the same."""
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
        if several or not all(isinstance(part, Tensor) and part.shape == parts[0].shape for part in parts):
            return parts
        if any(part.is_floating_point() for part in parts):
            parts = [part.double() for part in parts]
        return torch.stack(parts) if parts else torch.tensor([], dtype=torch.long)
    return value
