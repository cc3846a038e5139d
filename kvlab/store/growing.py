"""Growing: the plain KV cache, one concatenation per step (documents 002 and 003)."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import torch
from torch import Tensor

from ..answer import Answer, gather_slots
from .exact_sinks import ExactSinks
from .excerpt import Excerpt
from .format import Exact


class Growing(Answer):
    """Keep K and V in buffers that grow by concatenation, in the given format.

    Every step copies all that is held into a buffer one token longer: simple, exact in size, and the
    reason why static buffers exist.

    format: how a token is written down (`Exact()`, `Int(bits=4)`, `Float8()`, ...). values: the same for V
    (default: as K). sinks: so many first tokens of every row are held in full precision besides.
    State: `keys` and `values`, each a tuple of tensors `[batch, kv_heads, slots, width]`, and what the two
    formats hold.
    """

    per_slot = ("keys", "values")
    exact: ExactSinks | None = None  # holds the first tokens as they are

    def __init__(self, format: Exact | None = None, values: Exact | None = None, sinks: int = 0):
        self.format = Exact() if format is None else format
        self.value_format = copy.deepcopy(self.format if values is None else values)
        self.exact = None if sinks == 0 and not isinstance(sinks, bool) else ExactSinks(sinks)
        self.keys: tuple[Tensor, ...] | None = None
        self.values: tuple[Tensor, ...] | None = None

    def bind(self, shape, layer: int, model=None) -> None:
        self.format.bind(shape.head_dim)
        self.value_format.bind(shape.head_dim)

    @property
    def length(self) -> int:
        """Slots in use."""
        return 0 if self.keys is None else self.keys[0].shape[2]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token's K and V in one head, scales included."""
        parts = (*self.keys, *self.values)
        return sum(part.shape[-1] * part.element_size() for part in parts)

    @property
    def plain(self) -> bool:
        """Whether kernels may read `parts` instead of what `read` returns (see `Int.plain`)."""
        plain = (getattr(form, "plain", False) for form in (self.format, self.value_format))
        return self.exact is None and all(plain)

    def suits(self, keep, place) -> None:
        """ValueError when this store cannot serve such a keep or place."""
        if self.exact is not None and place.on_host:
            raise ValueError("sinks: tokens held in full precision stay on the device, not on a host")

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        """True bits for each number held, mean of K and V (see `Exact.bits_per_value`)."""
        forms = (self.format, self.value_format)
        bits = sum(form.bits_per_value(shape, dtype) for form in forms) / 2
        if self.exact is None:
            return bits
        (heads, tokens, width), sinks = shape, self.exact.tokens
        return bits + (sinks * (dtype.itemsize * 8 + 16 / width) + 16 / (heads * width)) / tokens

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        """Add tokens: `[batch, kv_heads, tokens, head_dim]` each; real `[batch, tokens]`: which of them are
        no padding (default: all)."""
        self.add(*self.encode(keys, values, real))

    def encode(self, keys: Tensor, values: Tensor, real: Tensor | None = None):
        """New tokens in their stored form, as `add` takes them. ValueError for what cannot be stored."""
        self.dtype = keys.dtype
        with naming("keys"):
            coded = self.format.encode(keys, real)
        with naming("values"):
            both = coded, self.value_format.encode(values, real)
        if self.exact is not None:
            self.exact.note(keys, values, real, self.length)
        return both

    def add(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
        """Add encoded tokens."""
        self.keys = _concat(self.keys, keys)
        self.values = _concat(self.values, values)

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """All of K and V as numbers on `device`, `[batch, kv_heads, slots, head_dim]`."""
        keys, values = self.excerpt(*self.parts()).read(device)
        if self.exact is not None:
            self.exact.restore(keys, values)
        return keys, values

    def pick(self, slots: Tensor) -> Excerpt:
        """The given slots `[batch, kv_heads, n]`, gathered in their stored form."""
        return self.excerpt(*(tuple(gather_slots(part, slots) for part in parts) for parts in self.parts()))

    def excerpt(self, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Excerpt:
        """K and V in this store's form that are held in other tensors."""
        return Excerpt(keys, values, self.format, self.value_format, self.plain, self.dtype)

    def parts(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """All of K and V in their stored form: what a link carries."""
        return self._used(self.keys), self._used(self.values)

    def select_rows(self, rows: Tensor) -> None:
        super().select_rows(rows)
        self.follow("select_rows", rows)

    def keep_slots(self, slots: Tensor) -> None:
        super().keep_slots(slots)
        self.follow("keep_slots", slots)

    def crop(self, length: int) -> None:
        super().crop(length)
        self.follow("crop", length)

    def follow(self, what: str, how) -> None:
        """Let the formats and the exact sinks do the same."""
        for answer in (self.format, self.value_format, self.exact):
            if answer is not None:
                getattr(answer, what)(how)

    def _used(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return parts


@contextmanager
def naming(what: str):
    """Say in a ValueError whether it is about keys or values."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _concat(old: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    # An own copy even of the first part: what the model hands over may be a view of a larger tensor.
    if old is None:
        return tuple(torch.clone(part, memory_format=torch.contiguous_format) for part in new)
    return tuple(torch.cat(pair, dim=2) for pair in zip(old, new, strict=True))
