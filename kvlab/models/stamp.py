"""Stamp: a model's parts at one moment, so that every step can tell whether they have changed."""

from __future__ import annotations

import operator
from itertools import chain

import torch
from torch import Tensor
from torch.nn.modules import module as of_all

NAMED = ("_parameters", "_buffers", "_modules")  # what a module holds by name
HOOKED = ("_forward_pre_hooks", "_forward_hooks")
GLOBAL = of_all._global_forward_pre_hooks, of_all._global_forward_hooks


class Stamp:
    """A model's modules, weights, hooks and numbers as they are now.

    Everything is read once, into flat lists of torch's own dictionaries, so a comparison is a few passes over
    them. It keeps no model alive.
    """

    def __init__(self, model):
        inside = [module for module in model.modules() if module is not model]
        weights = [vars(module)[name] for module in (model, *inside) for name in NAMED[:2]]
        modules = [vars(module)[name] for module in (model, *inside) for name in NAMED[2:]]
        hooks = [vars(module)[name] for module in inside for name in HOOKED]
        hooks += GLOBAL
        self.weights, self.modules, self.hooks = map(_Entries, (weights, modules, hooks))
        self.inside, self.kinds = inside, [type(module) for module in inside]
        self.forwards = [(kind, kind.forward) for kind in dict.fromkeys((type(model), *self.kinds))]
        self.config = model.config
        self.attributes = _Entries([vars(module) for module in (*inside, self.config)])
        self.parameters = list(model.parameters())
        self.places, self.forms = _places(self.parameters), _forms(self.parameters)
        self.buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    @property
    def hooking(self) -> list:
        """The hooks that are called below the model itself."""
        return self.hooks.found

    def same_parts(self, model) -> bool:
        """Whether the model computes with the same modules and numbers, whatever its weights and hooks."""
        try:
            return (
                model.config is self.config
                and self.modules.same()
                and self.attributes.equal()
                and [*map(type, self.inside)] == self.kinds
                and all(kind.forward is forward for kind, forward in self.forwards)
                and all(torch.equal(*pair) for pair in self.buffers)
            )
        except (RuntimeError, ValueError):  # an attribute is another tensor now, or array
            return False

    def same_weights(self) -> bool:
        """Whether every parameter is the same object, at the same address and of the same form."""
        return (
            self.weights.same()
            and _places(self.parameters) == self.places
            and _forms(self.parameters) == self.forms
        )

    def same_step(self, model) -> bool:
        """Whether a captured step of it is one of this model: only the contents of parameters and buffers may
        differ."""
        same = (
            self.hooks.same() and self.same_weights() and self.modules.same() and model.config is self.config
        )
        return same and self.attributes.equal()

    def same(self, model) -> bool:
        """Whether nothing has changed except numbers within parameters."""
        return self.hooks.same() and self.same_weights() and self.same_parts(model)


class _Entries:
    """What some dictionaries hold, in one list. It is compared at every step, when all weights have just
    gone through the processor's cache, so it touches little memory. Most of them are empty."""

    def __init__(self, tables: list[dict]):
        self.empty = [table for table in tables if not table]
        self.tables = [table for table in tables if table]
        self.found = self.now()

    def now(self) -> list:
        return [*chain.from_iterable(map(dict.values, self.tables))]

    def same(self) -> bool:
        """By identity: equal numbers in another tensor are another tensor."""
        now = self.now()
        return not any(self.empty) and len(now) == len(self.found) and all(map(operator.is_, now, self.found))

    def equal(self) -> bool:
        return not any(self.empty) and self.now() == self.found


def _places(parameters) -> list:
    return [*map(Tensor.data_ptr, parameters)]


def _forms(parameters) -> list:
    return [*map(Tensor.size, parameters), *map(Tensor.stride, parameters)]
