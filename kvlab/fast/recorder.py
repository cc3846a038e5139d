"""Recorder: a step's calls of torch, which show whether replaying it equals the next step."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from .suited import Unsuited

ASKS = (
    "_local_scalar_dense",
    "nonzero",
    "equal",
    "is_nonzero",
    "_unique2",
    "masked_select",
)  # wait for numbers
COPIES = ("aten::_to_copy", "aten::copy_")


class Recorder(TorchDispatchMode):
    """Records every operator inside this block: its name, its numbers, and for every tensor the form and its
    source, an address or the operator that made it. Results stay alive, so that no address is used twice.
    Unsuited for an operator that brings a number from the device to the host.
    """

    def __init__(self):
        super().__init__()
        self.found: list[tuple] = []
        self._makers: dict[int, int] = {}  # address of a storage -> the operator that made it
        self._alive: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.partition("::")[2] in ASKS:
            raise Unsuited(f"{name} asks the device for a number")
        out = func(*args, **(kwargs or {}))
        given, shape = tree_flatten((args, kwargs or {}))
        self.found.append((name, str(shape), *map(self._described, given)))
        made = [x for x in tree_flatten(out)[0] if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given if isinstance(x, Tensor)}
        for x in made:
            if (place := x.untyped_storage().data_ptr()) not in known:
                self._makers[place] = len(self.found)
        self._alive.append((given, out))
        tensors = [x for x in given if isinstance(x, Tensor)]
        if name in COPIES and len({x.is_cuda for x in (*tensors, *made)}) > 1:
            raise Unsuited(f"{name} carries numbers between host and device")
        return out

    def _described(self, x):
        if not isinstance(x, Tensor):
            return repr(x)
        place = x.untyped_storage().data_ptr()
        where = ("made", self._makers[place]) if place in self._makers else ("given", place)
        return (*where, x.storage_offset(), x.dtype, tuple(x.shape), x.stride())


def check_repeats(step, undo) -> None:
    """Unsuited if two consecutive steps are not the same operators on the same numbers and addresses: a graph
    of the first would not be the second. undo: called after them, since they have written."""
    both = []
    try:
        for _ in range(2):
            with Recorder() as recorder:
                step()
            both.append(recorder)  # holds what it has seen, until both are there
    finally:
        undo()
    first, second = (recorder.found for recorder in both)
    for one, other in zip(first, second, strict=False):
        if one != other:
            raise Unsuited(f"{one[0]} is given something else at every step")
    if len(first) != len(second):
        raise Unsuited("its steps are of different operators")
