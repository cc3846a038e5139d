"""Policy and State: parameters that never change, and the memory for one layer."""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from types import FunctionType, GetSetDescriptorType, NoneType

import torch
from torch import Tensor

from .gather import gather_slots, with_room
from .telling import is_ours, telling

# the usual types in states and classes, tested at every step of every layer; none holds a tensor
PLAIN = frozenset({int, float, bool, str, NoneType, FunctionType, property, GetSetDescriptorType, Field})


class _Sealed(type):
    """The metaclass of classes whose objects are immutable once made, and whose methods, in classes outside
    kvlab, raise errors that name the class and the method."""

    def __init__(cls, *given, **parameters):
        super().__init__(*given, **parameters)
        called = {name for one in cls.__mro__ if is_ours(one) for name in vars(one) if name[0] != "_"}
        for name in () if is_ours(cls) else sorted(called):
            home = next(one for one in cls.__mro__ if name in vars(one))
            own = vars(home)[name]
            if is_ours(home) or hasattr(own, "_tells") or hasattr(getattr(own, "fget", None), "_tells"):
                continue
            if isinstance(own, FunctionType):
                setattr(cls, name, telling(name, own))
            elif isinstance(own, property) and own.fget is not None:
                setattr(cls, name, property(telling(name, own.fget)))

    def __call__(cls, *args, **parameters):
        made = super().__call__(*args, **parameters)
        object.__setattr__(made, "_made", True)
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """Of a class: that of its `__init__`."""
        if cls.__init__ is object.__init__:
            return inspect.Signature()
        signature = inspect.signature(cls.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Policy(metaclass=_Sealed):
    """A keep, store, format, place or fetch: an immutable set of parameters, shared by all layers.

    `start(layer)` makes its state. Everything that a policy learns while a model runs belongs there.
    """

    _made = False

    @property
    def ours(self) -> bool:
        """Whether its class is one of kvlab's, which the tests compare: others are checked."""
        return is_ours(type(self))

    def start(self, layer) -> State:
        """The state of one layer (see `Layer`). ValueError if a parameter does not fit the model."""
        return State(self)

    def __setattr__(self, name: str, value) -> None:
        if self._made:
            raise AttributeError(
                f"{type(self).__name__}.{name}: a policy's parameters do not change; make another one, and "
                "write to the state what is learned"
            )
        if _holds_tensor(value):
            raise TypeError(
                f"{type(self).__name__}.{name} is a tensor, but a policy holds parameters: name it in "
                "per_row or per_slot, and write it to the state"
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo) -> Policy:
        return self


class State:
    """The memory of a policy for one layer, with a declaration of how each tensor is handled.

    per_slot: attributes that are tensors, or tuples of them, `[batch, kv_heads, slots, ...]`. filled: if they
    are buffers with reserved room, the number of slots in use (else None); keeps_room: whether they reserve
    as much after a fork or an eviction. per_row: attributes that have only the batch as first dimension, or
    are lists with an entry for each row. states: states of their own. of_prompt: of per_slot, those that only
    the prompt's slots have. lags: whether the newest slots may be missing in per_slot. shared: tensors of the
    model, or in transfer, which belong to no row or slot and are not counted.
    named: a policy that names more attributes in its own `per_row`, `per_slot`, `states` and `shared`. Forks,
    evictions, crops, copies and byte counts come from this; a tensor in any other attribute is refused
    (TypeError).
    """

    per_row: tuple[str, ...] = ()
    per_slot: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    of_prompt: tuple[str, ...] = ()
    filled: int | None = None
    keeps_room = lags = False

    def __init__(self, policy: Policy, named: Policy | None = None):
        self.policy, kinds = policy, ("per_row", "per_slot", "states", "shared")
        ours = {"policy", *(name for one in type(self).__mro__ if is_ours(one) for name in vars(one))}
        for kind in kinds:
            for name in getattr(named, kind, ()):
                if name in ours or any(name in getattr(self, each) for each in kinds):
                    raise ValueError(
                        f"{type(named).__name__}: {kind} names {name!r}, which is taken: name it otherwise"
                    )
                setattr(self, kind, (*getattr(self, kind), name))
        for name in (*self.per_row, *self.per_slot, *self.states, *self.shared):
            setattr(self, name, None)

    def __setattr__(self, name: str, value) -> None:
        if name not in (*self.per_row, *self.per_slot, *self.shared):
            self._check(name, value)
        super().__setattr__(name, value)

    def _check(self, name: str, value) -> None:
        if _holds_tensor(value):
            raise TypeError(
                f"the state of {type(self.policy).__name__} keeps a tensor in {name!r}: declare it in "
                "per_row (one entry per row of the batch) or per_slot (one per token held)"
            )

    def __deepcopy__(self, memo) -> State:
        memo[id(self)] = twin = object.__new__(type(self))
        for name, value in vars(self).items():
            setattr(twin, name, value if name in self.shared else _copied(value, memo))
        return twin

    def contents(self) -> dict:
        """Its memory, by name: `refill` puts it into a fresh state."""
        given = {"policy", "per_row", "per_slot", "states", "shared", *self.shared}
        return {name: value for name, value in vars(self).items() if name not in given}

    def refill(self, contents: dict) -> None:
        """Take over another state's `contents`."""
        for name, value in contents.items():
            setattr(self, name, value)

    def memory(self) -> list[tuple[State, dict]]:
        """It and the states inside, each with what it holds now, so that a refusal can put that back."""
        inside = (one for state in self._states() for one in state.memory())
        return [(self, dict(vars(self))), *inside]

    def odd(self, batch: int, heads: int, slots: int, numbers: bool = True) -> str | None:
        """The parts that do not fit a layer of this many rows, KV heads and slots, or (numbers) hold NaN."""
        if self.filled is not None and not 0 <= self.filled <= slots:
            return f"filled is {self.filled}"
        for name in (*self.per_row, *self.per_slot):
            value, by_slot = getattr(self, name), name in self.per_slot
            if value is None or (isinstance(value, list) and not by_slot and len(value) == batch):
                continue
            for x in value if isinstance(value, tuple) else (value,):
                if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
                    return f"{name} is neither a tensor nor a list of {batch}"
                if by_slot and self.filled is not None:
                    x = x[:, :, : self.filled]
                filled = slots if self.filled is None else self.filled
                fewest, by_slot = 0 if self.lags else filled, by_slot and name not in self.of_prompt
                if not self._fits(x, batch) or (
                    by_slot and (x.shape[1] not in (1, heads) or not fewest <= x.shape[2] <= filled)
                ):
                    return f"{name} is of shape {tuple(x.shape)}"
                if numbers and x.is_floating_point() and bool(x.float().isnan().any()):
                    return f"{name} holds NaN"
        return next(filter(None, (state.odd(batch, heads, slots, numbers) for state in self._states())), None)

    def _fits(self, x: Tensor, batch: int) -> bool:
        return x.dim() > 0 and len(x) == batch

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor that it holds. TypeError for one in an undeclared list or dictionary, here, in the
        policy or in either class."""
        for name in vars(self).keys() - {*self.per_row, *self.per_slot, *self.shared}:
            self._check(name, getattr(self, name))
        for one in (self.policy, *type(self.policy).__mro__, *type(self).__mro__):
            for name, value in vars(one).items() if one is not object else ():
                if _holds_tensor(value):
                    self._check(name, value)
        for name in (*self.per_row, *self.per_slot):
            value = getattr(self, name)
            each = value if isinstance(value, tuple | list) else (value,)
            yield from (x for x in each if isinstance(x, Tensor))
        for state in self._states():
            yield from state.tensors()

    @property
    def spare_bytes(self) -> int:
        """Bytes reserved for tokens to come."""
        return sum(state.spare_bytes for state in self._states())

    def select_rows(self, rows: Tensor) -> None:
        """Keep, repeat or reorder batch rows: row i becomes a copy of the old row `rows[i]`."""
        self._change(self.per_row, lambda x: x.index_select(0, rows.to(x.device)), rows.tolist())
        self._change(self.per_slot, lambda x: self._rows(x, rows.to(x.device)))
        for state in self._states():
            state.select_rows(rows)

    def keep_slots(self, slots: Tensor) -> None:
        """Drop every slot that is not in `slots` `[batch, kv_heads, n]` (-1: nothing there)."""
        self._change(self.per_slot, lambda x: self._kept(x, slots))
        if self.filled is not None:
            self.filled = slots.shape[2]
        for state in self._states():
            state.keep_slots(slots)

    def crop(self, length: int) -> None:
        """Keep the first `length` slots."""
        if self.filled is None:
            self._change(self.per_slot, lambda x: x[:, :, :length].clone())  # dropped slots leave memory
        else:
            self.filled = min(self.filled, length)
        for state in self._states():
            state.crop(length)

    def _change(self, names: tuple[str, ...], change, rows: list[int] = ()) -> None:
        """Change the tensors of these attributes; a list keeps the entries of `rows`."""
        for name in names:
            value = getattr(self, name)
            if isinstance(value, tuple):
                setattr(self, name, tuple(map(change, value)))
            elif isinstance(value, list):
                setattr(self, name, [value[row] for row in rows])
            elif value is not None:
                setattr(self, name, change(value))

    def _rows(self, x: Tensor, rows: Tensor) -> Tensor:
        if self.filled is None:
            return x.index_select(0, rows)
        chosen = x[:, :, : self.filled].index_select(0, rows)
        return with_room(chosen, x.shape[2], x.is_pinned()) if self.keeps_room else chosen

    def _kept(self, x: Tensor, slots: Tensor) -> Tensor:
        return gather_slots(x, slots)

    def _states(self) -> Iterator[State]:
        return (state for state in (getattr(self, name) for name in self.states) if state is not None)


class View:
    """A policy's view: a layer, read-only, and the policy's own `state`.

    slot_positions: int `[batch, kv_heads, slots]`, which token of its row sits in each slot (-1: none).
    some_empty: the same, or None as long as slot j holds token j in every row. slots: number in use. lengths,
    rows_held: lists, real tokens that each row has seen and holds. store: the tokens held,
    `store.read(device)` decodes them. fetched: int `[batch, kv_heads, n]`, slots that the step attended to
    (None: all). in_prompt: this pass is part of the prompt, or of a later turn (`later`: tokens of each row
    before it); prefilling: and more of it may come. index, order (among the layers that attend), kv_heads,
    shape (`ModelShape`), scaling, softcap, sinks, local (window or chunk, or None): of the layer. rank,
    ranks: of this process and of all that share the layer's heads (`ranks.py`); kv_heads are its own.
    """

    __slots__ = ("_layer", "state")
    SHOWN = (
        "slot_positions", "lengths", "rows_held", "slots", "store", "fetched", "index", "kv_heads", "shape",
        "order", "scaling", "softcap", "sinks", "local", "in_prompt", "later", "prefilling", "rank",
        "ranks",
    )  # fmt: skip

    def __init__(self, layer, state: State):
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "state", state)

    @property
    def some_empty(self) -> Tensor | None:
        return self._layer.table.moved

    @property
    def stored(self) -> Iterator[Tensor]:
        """The tensors that hold the tokens."""
        return self._layer.store.tensors()

    def __getattr__(self, name: str):
        if name not in View.SHOWN:
            raise AttributeError(f"a policy sees {', '.join(View.SHOWN)} and its state, not {name!r}")
        return getattr(self._layer, name)

    def __setattr__(self, name: str, value) -> None:
        raise AttributeError(f"{name}: a policy may write to its state only")


def _copied(value, memo):
    """A deep copy, pinned if the original is."""
    if isinstance(value, Tensor):
        twin = value.detach().clone()
        return twin.pin_memory() if value.is_pinned() else twin
    if type(value) is tuple:
        return tuple(_copied(item, memo) for item in value)
    return copy.deepcopy(value, memo)


def _holds_tensor(value) -> bool:
    if type(value) in PLAIN:
        return False
    if isinstance(value, list | tuple | set | deque):
        return any(map(_holds_tensor, value))
    if is_dataclass(value) and not isinstance(value, type | Policy):
        return any(_holds_tensor(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, dict):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, Tensor)
