"""Replayed: CUDA graphs on a CPU, for tests: operators are recorded, and run again on their tensors."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import kvlab


class _Tape(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
            made = tensors(out)
            views = made and all(x.untyped_storage().data_ptr() in given for x in made)
            if views and not func._schema.is_mutable:
                continue  # the same memory again
            again = tensors(func(*args, **kwargs))
            for old, new in zip(made, again, strict=True):
                if not func._schema.is_mutable:
                    old.copy_(new)


def replaying(model):
    """A copy of the model whose decode steps are replayed."""
    from kvlab.fast import graph  # not there where fast/ is hidden

    model = copy.deepcopy(model)
    model.forward = graph.Forward(kvlab.prepare(model))
    return model


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_flatten(tree)[0] if isinstance(x, torch.Tensor)]


def captured(run, device):
    """As `graph.captured`. Nothing is computed by capturing: what has been written is put back."""
    kept = {}

    class Before(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            for x in tensors((args, kwargs or {})):
                place = x.untyped_storage().data_ptr()
                if place not in kept:
                    kept[place] = x.untyped_storage(), x.untyped_storage().clone()
            return func(*args, **(kwargs or {}))

    tape = _Tape()
    with Before(), tape:  # the tape is asked first, and does not see what the other one copies
        made = run()
    for storage, before in kept.values():
        storage.copy_(before)
    return tape.replay, made
