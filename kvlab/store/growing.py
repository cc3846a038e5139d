"""Growing: the usual KV cache, in buffers that grow with the text."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..gather import begun, by_token, gather_slots, with_room
from ..late import Late
from ..parameters import FEW, check_kind, check_whole
from ..policy import Policy, State
from .exact import Exact, Parts, check_own
from .exact_sinks import ExactSinks

LEAST_ROOM = 16  # slots


@dataclass(frozen=True)
class Growing(Policy):
    """Keep K and V in buffers that grow with the text, in the given format.

    The prompt fills its buffer; a later token is written into the next free slot. If none is free, everything
    is copied into a buffer with room for an eighth more (at least 16 slots): in total a long text is copied
    about nine times, not once per step. `Stats.spare_bytes` counts this room. While a keep drops tokens,
    there is only room for the new tokens, and the kept ones move up in their buffer.

    format: how a token is written down (`Exact()`, `Int(bits=4)`, `Float8()`, ...). values: the same for V
    (default: as K). sinks: this many first tokens of every row are also held in full precision.
    """

    format: Exact | None = None
    values: Exact | None = None
    sinks: int = 0

    takes_ragged = False  # True: heads with different numbers of tokens take no more bytes than these need

    def __post_init__(self):
        for name in ("format", "values"):
            check_kind(name, getattr(self, name), Exact | None, "a format such as Int()")
        object.__setattr__(self, "format", Exact() if self.format is None else self.format)
        object.__setattr__(self, "values", self.format if self.values is None else self.values)
        check_whole("sinks", self.sinks, 0, most=FEW)

    @property
    def as_they_are(self) -> bool:
        """Whether numbers are held unrounded."""
        return {type(self.format), type(self.values)} == {Exact}

    def start(self, layer) -> GrowingState:
        self.check(layer.shape.head_dim, layer.shape.value_dim, layer.local)
        return GrowingState(self)

    def of(self, order: int, layers: int) -> Growing:
        """The store of the layer with this index among those that attend: the same for all."""
        return self

    def check(self, key: int, value: int, window: int | None) -> None:
        """ValueError for head dimensions, or a sliding window, that it cannot hold."""
        for form, width in ((self.format, key), (self.values, value)):
            form.check(width)
            check_own(form, width)

    def reserved(self, held: int, context: int) -> int:
        """Slots reserved for a row that holds `held` tokens, where the text may grow to `context`."""
        return held

    def suits(self, keep, place) -> None:
        """ValueError when this store cannot serve such a keep or place."""
        if keep.ragged and keep.evicts and not self.takes_ragged:
            raise ValueError(
                f"{type(keep).__name__} lets heads hold different numbers of tokens, for which "
                f"{type(self).__name__} reserves the most that any holds: use store=Ragged(...)"
            )
        if self.sinks and place.on_host:
            raise ValueError("sinks: tokens held in full precision stay on the device, not on a host")

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        """True bits for each number held, mean of K and V (see `Exact.bits_per_value`)."""
        bits = sum(form.bits_per_value(shape, dtype) for form in (self.format, self.values)) / 2
        if not self.sinks:
            return bits
        heads, tokens, width = shape
        return bits + (self.sinks * (dtype.itemsize * 8 + 16 / width) + 16 / (heads * width)) / tokens


class GrowingState(State):
    """K and V of one layer: keys and values, each a tuple of buffers `[batch, kv_heads, capacity, width]`, of
    which the first `filled` slots are in use; fixed_keys, fixed_values: decided by the first tokens (see
    `Exact`); exact: first tokens in full precision.

    replaced: values that could not be stored and became the largest one; beyond (a tensor, to avoid waiting):
    those outside the range of the first tokens. copies: tokens copied into longer buffers. late: refuses K
    and V of a single token on a GPU.
    """

    per_slot = ("keys", "values")
    per_row = ("fixed_keys", "fixed_values", "begun")
    states = ("exact",)
    shared = ("late", "beyond")
    max_length = -1  # tokens that it can ever hold: no limit
    filled = 0
    in_blocks = False  # whether K's codes share their numbers in blocks of tokens, as KIVI's do

    def __init__(self, policy: Growing):
        super().__init__(policy)
        self.tight = False  # once tokens go, room is only made for new ones: as many go again
        self.format, self.value_format = policy.format, policy.values
        self.late = Late(), Late()
        self.fixed_keys = self.fixed_values = ()
        self.begun = None
        self.exact = ExactSinks(policy, policy.sinks) if policy.sinks else None
        self.replaced, self.copies, self.filled, self.dtype = 0, 0, 0, torch.float32

    def __deepcopy__(self, memo) -> GrowingState:
        twin = super().__deepcopy__(memo)
        twin.beyond = (
            None if self.beyond is None else self.beyond.clone()
        )  # captured steps add to it in place
        return twin

    @property
    def length(self) -> int:
        """Slots in use."""
        return self.filled

    def check_crop(self, length: int) -> None:
        """ValueError if the state at `length` tokens cannot be restored."""

    @property
    def clipped(self) -> int:
        """Values that were stored as the largest one that could be."""
        return self.replaced + int(self.beyond or 0)

    @property
    def spare_bytes(self) -> int:
        """Bytes of the slots that are reserved for tokens to come, beyond what the policy names."""
        if self.keys is None or self.filled == self.keys[0].shape[2]:
            return 0
        batch, heads, capacity, _ = self.keys[0].shape
        return (capacity - self.filled) * batch * heads * self.bytes_per_slot

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in one head, scales included."""
        return sum(part.shape[-1] * part.element_size() for part in (*self.keys, *self.values))

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        """Add tokens: `[batch, kv_heads, tokens, head_dim]` each; real `[batch, tokens]`: which of them are
        no padding (default: all)."""
        self.add(*self.encode(keys, values, real))

    def encode(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> tuple[Parts, Parts]:
        """New tokens in their stored form, as `add` takes them. ValueError for numbers that cannot be
        stored."""
        self.dtype = keys.dtype
        with naming("keys"), self.late[0].open():
            coded, self.fixed_keys = self._encode(self.format, keys, real, self.fixed_keys)
        with naming("values"), self.late[1].open():
            coded_values, self.fixed_values = self._encode(self.value_format, values, real, self.fixed_values)
        if (self.fixed_keys or self.fixed_values) and not all(self.begun or [False]):
            seen = [True] * len(keys) if real is None else real.any(-1).tolist()
            self.begun = [one or now for one, now in zip(self.begun or seen, seen, strict=True)]
        if self.exact is not None:
            self.exact.note(keys, values, real, self.length)
        return coded, coded_values

    def _encode(self, form: Exact, x: Tensor, real: Tensor | None, fixed: Parts) -> tuple[Parts, Parts]:
        """The parts with an entry for each token, and those that the first tokens decide."""
        x, replaced = form.admit(x)
        self.replaced += replaced
        if fixed and not all(self.begun):  # rows that were all padding have decided nothing yet
            late, begun = form.write(x, real), torch.tensor(self.begun, device=x.device)
            fixed = tuple(
                torch.where(begun.view(-1, *[1] * (one.dim() - 1)), one, new)
                for one, new in zip(fixed, late[-len(fixed) :], strict=True)
            )
        fixed = fixed or form.given(len(x))
        if fixed and (beyond := form.beyond(x, fixed)) is not None:
            mine = beyond if real is None else beyond & real.to(beyond.device)[:, None, :, None]
            self.beyond = mine.sum() + (0 if self.beyond is None else self.beyond)
        coded = form.write(x, real, fixed)
        count = len(coded) - form.fixed_parts
        self.replaced += form.cut(x, coded[count:])
        return coded[:count], coded[count:]

    def add(self, keys: Parts, values: Parts) -> None:
        """Add encoded tokens. Pinned ones come from a link, which no longer needs them: the store may take
        over the first ones as its buffers."""
        count = keys[0].shape[2]
        if self.keys is None:
            linked = all(x.is_pinned() and by_token(x).is_contiguous() for x in (*keys, *values))
            make = partial(map, begun) if linked else partial(joined, None)
            self.keys, self.values = tuple(make(keys)), tuple(make(values))
        else:
            self.reserve(count)
            for buffer, new in zip((*self.keys, *self.values), (*keys, *values), strict=True):
                buffer[:, :, self.filled : self.filled + count] = new
        self.filled += count

    def reserve(self, tokens: int) -> None:
        """Make room for more tokens."""
        end = self.filled + tokens
        if end > self.keys[0].shape[2]:
            self._lengthen(end if self.tight else end + max(LEAST_ROOM, end // 8))

    def _lengthen(self, capacity: int) -> None:
        """Copy the tokens into buffers of `capacity` slots, pinned if the old ones are, so that a GPU can
        read them."""

        def longer(parts: Parts) -> Parts:
            return tuple(with_room(x, capacity, x.is_pinned()) for x in parts)

        self.keys, self.values = map(longer, self.used())
        self.copies += self.filled

    def parts(self) -> tuple[Parts, Parts]:
        """All of K and V in their stored form: what a link carries."""
        return self.used()

    def used(self) -> tuple[Parts | None, Parts | None]:
        """The slots of the buffers that are in use."""
        if self.keys is None or self.filled == self.keys[0].shape[2]:
            return self.keys, self.values
        return tuple(tuple(x[:, :, : self.filled] for x in parts) for parts in (self.keys, self.values))

    def keep_slots(self, slots: Tensor) -> None:
        super().keep_slots(slots)
        self.tight = True

    def settle(self) -> None:
        """Called when no more tokens will go: make room for a text that grows."""
        self.tight = False

    def stays(self, count: int, room: int) -> bool:
        """Whether `count` tokens stay in a buffer of `room` slots after others have gone."""
        return self.keeps_room or (self.tight and room - count <= max(1, count // 8))

    def _kept(self, x: Tensor, slots: Tensor) -> Tensor:
        if not self.stays(count := slots.shape[2], x.shape[2]):
            found = gather_slots(x, slots)
            return with_room(found, count + max(1, count // 8), True) if x.is_pinned() else found
        x[:, :, : slots.shape[2]] = gather_slots(x, slots)
        return x

    def contents(self) -> dict:
        found = super().contents() | {"replaced": self.clipped}
        if found.get("keys") is not None:
            found["keys"], found["values"] = self.used()
        return found

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of K and V as numbers on `device`, `[batch, kv_heads, slots, head_dim]`."""
        keys, values = self.packed(*self.parts()).read(device)
        if self.exact is not None:
            self.exact.restore(keys, values)
        return keys, values

    def pick(self, slots: Tensor) -> Packed:
        """The given slots `[batch, kv_heads, n]`, gathered in their stored form."""
        both = self.parts()
        return self.packed(*(tuple(gather_slots(part, slots) for part in parts) for parts in both))

    def packed(self, keys: Parts, values: Parts) -> Packed:
        """K and V in this store's form that are held in other tensors."""
        fixed = self.fixed_keys, self.fixed_values
        return Packed(keys, values, self.format, self.value_format, self.dtype, *fixed)


@dataclass(frozen=True)
class Packed:
    """The tokens that a step attends to, if they are only part of a store or are elsewhere. Reads like a
    store.

    keys, values: tensors `[batch, kv_heads, slots, width]` in the stored form. format, value_format: their
    formats. fixed_keys, fixed_values: the formats' fixed parts. dtype: of the numbers.
    """

    keys: Parts
    values: Parts
    format: Exact
    value_format: Exact
    dtype: torch.dtype
    fixed_keys: Parts = ()
    fixed_values: Parts = ()

    @classmethod
    def of_numbers(cls, keys: Tensor, values: Tensor) -> Packed:
        """From K and V that have been read."""
        return cls((keys,), (values,), Exact(), Exact(), keys.dtype)

    @property
    def length(self) -> int:
        """Slots."""
        return self.keys[0].shape[2]

    def parts(self) -> tuple[Parts, Parts]:
        """K and V in their stored form."""
        return self.keys, self.values

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """K and V as numbers on `device`, `[batch, kv_heads, slots, head_dim]` each."""
        keys, values = (tuple(part.to(device) for part in parts) for parts in (self.keys, self.values))
        return (
            self.format.decode((*keys, *self.fixed_keys), self.dtype),
            self.value_format.decode((*values, *self.fixed_values), self.dtype),
        )


@contextmanager
def naming(what: str):
    """Say in a ValueError whether it is about keys or values."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error.__cause__


def joined(old: Parts | None, new: Parts) -> Parts:
    """Parts of earlier tokens (None: there are none) and of new ones."""
    # Copy even the first part: the model's tensor may be a view of a larger one.
    if old is None:
        return tuple(torch.clone(part, memory_format=torch.contiguous_format) for part in new)
    return tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
