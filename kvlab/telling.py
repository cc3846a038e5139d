"""Telling: errors that a method of one's own raises name its class and itself, in one line."""

from __future__ import annotations

import functools
from types import FunctionType, GeneratorType
from typing import NoReturn

import torch
from torch import Tensor

from .errors import first_line, kind_and_line

READ_ONLY = ("score", "by_rule", "limits", "shares", "select", "speculate", "decode")  # they only return


def is_ours(one: type) -> bool:
    """Whether a class is one of kvlab's."""
    return one.__module__.partition(".")[0] == __name__.partition(".")[0]


def blaming(method: FunctionType) -> FunctionType:
    """A method of a layer, whose errors name the policy of one's own that the layer has: kvlab's own code
    works with what that left. Not those that say themselves what is wrong."""

    @functools.wraps(method)
    def called(layer, *given):
        try:
            return method(layer, *given)
        except Exception as error:
            said = (
                isinstance(error, ValueError | torch.OutOfMemoryError) or type(error).__module__ != "builtins"
            )
            policies = [state.policy for state in (layer.keep, layer.store, layer.place)]
            parts = [*policies, *(part for policy in policies for part in vars(policy).values())]
            ones = [part for part in parts if hasattr(part, "start") or hasattr(part, "seals")]  # and links
            own = [type(part).__name__ for part in ones if not is_ours(type(part))]
            if said or not own or str(error).startswith(f"the state of {own[0]}"):
                raise
            raise ValueError(f"{own[0]}, layer {layer.index}: {kind_and_line(error)}") from error

    return called


def telling(name: str, method: FunctionType) -> FunctionType:
    """The method, whose errors name it and its class in one line; a TypeError stays one, and any other error
    is the cause of a ValueError."""

    @functools.wraps(method)
    def called(self, *given, **named):
        before = versions(given) if name in READ_ONLY else None
        try:
            found = method(self, *given, **named)
            if before is not None and versions(given) != before:
                raise ValueError("it writes in place to a tensor that it was given; expected a copy")
        except Exception as error:
            tell(error, self, *given)
        return each(found, self, *given) if isinstance(found, GeneratorType) else found

    def each(found: GeneratorType, self, *given):
        try:
            yield from found
        except Exception as error:
            tell(error, self, *given)

    def tell(error: Exception, self, layer=None, *others) -> NoReturn:
        whose, index = f"{type(self).__name__}.", getattr(layer, "index", None)
        if isinstance(error, torch.OutOfMemoryError) or str(error).startswith(whose):
            raise error
        where = f", layer {index}" if isinstance(index, int) else ""
        told = TypeError if isinstance(error, TypeError) else ValueError
        line = first_line(error) if type(error) in (TypeError, ValueError) else kind_and_line(error)
        raise told(f"{whose}{name}{where}: {line}") from error

    called._tells = True
    return called


def versions(given) -> list[int]:
    """How often each tensor that a method is given, or that the store of its layer holds, was written to.
    Tensors of torch's inference mode do not count that."""
    found: list[int] = []
    for one in given:
        held = getattr(one, "stored", one if isinstance(one, tuple) else (one,))  # a `View` has it
        found += [part._version for part in held if isinstance(part, Tensor) and not part.is_inference()]
    return found
