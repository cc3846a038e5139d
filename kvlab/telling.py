"""Telling: errors that a method of one's own raises name its class and itself, in one line."""

from __future__ import annotations

import functools
from types import FunctionType, GeneratorType
from typing import NoReturn

import torch

from .errors import first_line, kind_and_line


def is_ours(one: type) -> bool:
    """Whether a class is one of kvlab's."""
    return one.__module__.partition(".")[0] == __name__.partition(".")[0]


def telling(name: str, method: FunctionType) -> FunctionType:
    """The method, whose errors name it and its class in one line; a TypeError stays one, and any other error
    is the cause of a ValueError."""

    @functools.wraps(method)
    def called(self, *given, **named):
        try:
            found = method(self, *given, **named)
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
