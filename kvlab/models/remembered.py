"""Remembered: what was found out about a model, for as long as the model stays as it was."""

from __future__ import annotations

import weakref
from itertools import chain

from torch import Tensor
from torch.nn import Parameter

PLAIN = int, float, str


class Remembered:
    """{model: {key: what was found}}; it keeps no model alive. A model that has changed is asked again: other
    weights or parts, numbers written into them (not through `.data` or numpy), another configuration."""

    def __init__(self):
        self._found: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> (its state, found)

    def of(self, model) -> dict:
        """What is known of the model as it is now, to be read and added to."""
        now = _state(model)
        state, found = self._found.get(model, (None, {}))
        if state != now:
            state, found = self._found[model] = now, {}
        return found


def _state(model) -> tuple:
    parts = [*model.modules()]
    plain = [_plain(value) for part in parts for value in vars(part).values()]
    numbers = [*map(_version, chain(model.parameters(), model.buffers()))]
    return [*map(id, parts)], plain, numbers, repr(vars(model.config))


def _plain(value):
    """A number, a word or a list of them, such as the names of active adapters; None for anything else."""
    if isinstance(value, list | tuple) and all(isinstance(one, PLAIN) for one in value):
        return [*value]
    return value if isinstance(value, PLAIN) else None


def _version(x: Tensor) -> tuple[int, ...]:
    """Of weights that are elsewhere until they are used (accelerate), nothing can be told."""
    if x.is_meta:
        return ()
    place = x.data_ptr() if type(x) in (Tensor, Parameter) else 0  # other kinds may have none
    return id(x), place, 0 if x.is_inference() else x._version
