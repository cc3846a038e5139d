"""Lean: copies of a decoder layer that compute its query and leave out what the query does not need."""

from __future__ import annotations

import copy
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import first_line
from ..interface import Asked, stopping


@dataclass(eq=False)
class Narrow:
    """The part of a query that is needed: these output channels `[n]` of its projection, the others become
    zero. For a model that does not mix channels after the projection, as RoPE does. attention: the module
    that computes it, once a `Lean` has made it."""

    projection: nn.Linear
    channels: Tensor
    attention: nn.Module | None = None


class Lean:
    """A decoder layer's way from its input to its query, without the projections to K and V.

    block, attention: the layer and its attention module, whose weights are shared. A part of the attention
    is left out if the query is the same when that part returns NaN, which the first call tries: its result
    becomes zeros. Where one projection makes Q, K and V, nothing is left out.
    """

    def __init__(self, block: nn.Module, attention: nn.Module):
        self.parts = _parts(block, attention)
        self.before = _copied(block, {attention: _Stop()})
        self.whole, self.short = attention, None
        self.zeros: dict[nn.Module, nn.Module] = {}

    def arguments(self, block_input: Tensor, given: dict) -> tuple[tuple, dict]:
        """What the layer gives its attention for this input: positional arguments, and those by name."""
        return asked(self.before, (block_input,), given)

    def query(self, args: tuple, given: dict, narrow: Narrow | None = None) -> Tensor:
        """The query for these arguments, `[batch, heads, tokens, head_dim]`."""
        if self.short is None:
            self._try(args, given)
        if narrow is None:
            return asked(self.short, args, given)
        if narrow.attention is None:
            rows = _Rows(narrow.projection, narrow.channels)
            narrow.attention = _copied(self.whole, self.zeros | {narrow.projection: rows})
        return asked(narrow.attention, args, given)

    def _try(self, args: tuple, given: dict) -> None:
        query = asked(self.whole, args, given)
        for part in self.whole.children():
            spoilt = _Spoilt(part)
            same = asked(_copied(self.whole, {part: spoilt}), args, given).equal(query)
            if same and spoilt.width:
                self.zeros[part] = _Zeros(spoilt.width)
        self.short = _copied(self.whole, self.zeros)


def lean(block: nn.Module, attention: nn.Module) -> Lean:
    """The `Lean` of this layer, made again after a part of it was replaced."""
    found = _made.get(block)
    if found is None or found.parts != _parts(block, attention):
        found = _made[block] = Lean(block, attention)
    return found


_made: weakref.WeakKeyDictionary[nn.Module, Lean] = weakref.WeakKeyDictionary()


def _parts(block: nn.Module, attention: nn.Module) -> list:
    return [*block.named_children(), *attention.named_children()]


def asked(module: nn.Module, args: tuple, given: dict):
    """The query with which a forward calls its attention function, or what it gives the `_Stop` in it."""
    try:
        with stopping():
            module.forward(*args, **given)
    except Asked as stop:
        return stop.args[0]
    except TypeError as error:
        raise ValueError(
            f"{type(module).__name__} is called with more than its input, and cannot be asked for its query "
            f"beforehand: {first_line(error)}"
        ) from error
    raise ValueError(f"{type(module).__name__} does not call the attention function")


def _copied(module: nn.Module, replaced: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module with some parts replaced, without hooks, which shares all other parts, weights and
    attributes."""
    if module in replaced:
        return replaced[module]
    if not any(part in replaced for part in module.modules()):
        return module
    held = (value.values() if isinstance(value, dict) else (value,) for value in vars(module).values())
    shared = {id(value): value for values in held for value in values}
    shared |= {id(part): _copied(part, replaced) for part in module.children()}
    made = copy.deepcopy(module, shared)
    for name, value in vars(made).items():
        if "hook" in name and isinstance(value, dict):
            value.clear()  # a forward does not call them, and they may know the whole model
    return made


class _Stop(nn.Module):
    """In place of an attention module: ends the forward with what it is given."""

    def forward(self, *args, **given):
        raise Asked((args, given))


class _Spoilt(nn.Module):
    """A part that returns NaN. width: the last dimension of its result, if the others are its input's."""

    width: int | None = None

    def __init__(self, part: nn.Module):
        super().__init__()
        self.part = part

    def forward(self, *args, **given):
        out = self.part(*args, **given)
        numbers = isinstance(out, Tensor) and out.is_floating_point()
        if args and numbers and out.shape[:-1] == args[0].shape[:-1]:
            self.width = out.shape[-1]
            return torch.full_like(out, torch.nan)
        return out


class _Zeros(nn.Module):
    """In place of a part whose result is not needed."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, *args, **given) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.width)


class _Rows(nn.Module):
    """Some output channels of a linear module; the others are zero."""

    def __init__(self, projection: nn.Linear, channels: Tensor):
        super().__init__()
        self.channels, self.width = channels, projection.out_features
        self.weight = projection.weight.detach()[channels]  # [n, hidden]
        self.bias = None if projection.bias is None else projection.bias.detach()[channels]

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], self.width)
        out[..., self.channels] = linear(x, self.weight, self.bias)
        return out
