"""KIVI: keys per channel, values per token, recent tokens exact (Liu et al. 2024, arXiv 2402.02750)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..gather import with_room
from ..parameters import FEW, check_one_of, check_whole
from .exact import Exact, Parts
from .growing import Growing, GrowingState, joined, naming
from .int import Int
from .planes import pack, unpack


class Kivi(Growing):
    """Quantize keys per channel over blocks of tokens and values per token, except a window of recent tokens.

    K's outliers sit in a few channels, so each channel of a block has its own scale and zero point; a block
    can only be written when all its tokens have come. Until then they are held in full precision, as are the
    last `recent` tokens: the window holds `recent` to `recent + group - 1` tokens. When it overflows, its
    oldest `group` tokens are written, for good.
    Unlike in the paper, V has the same window as K, and blocks are counted back from the end of the prompt,
    so the first one may be short: in a left-padded batch each row then has the same blocks as alone.

    bits: 2, 4 or 8. group: tokens of a block of K, and channels of V that share a scale (their greatest
    common divisor with head_dim). recent: newest tokens in full precision, 0 or more. nonfinite: as in `Int`.
    Cost of the codes: bits + 32 / group bits per value. Blocks cannot lose single tokens: ValueError for an
    evicting keep and for a host that fetches tokens.
    """

    def __init__(self, bits: int = 2, group: int = 32, recent: int = 32, nonfinite: str = "refuse"):
        check_one_of("bits", bits, (2, 4, 8))
        check_whole("group", group, 1, most=FEW)
        check_whole("recent", recent, 0, most=FEW)
        super().__init__(
            Int(bits, axis="channel", symmetric=False, nonfinite=nonfinite),
            Int(bits, group, symmetric=False, nonfinite=nonfinite),
        )
        self.group, self.recent = group, recent

    def check(self, key: int, value: int, window: int | None) -> None:
        self.format.check(key)
        self.values_of(value).check(value)
        if window is not None:
            raise ValueError(
                "kivi: keys are written in blocks of tokens, so a sliding window cannot let single ones go; "
                "use int2 or int4"
            )

    def start(self, layer) -> KiviState:
        self.check(layer.shape.head_dim, layer.shape.value_dim, layer.local)
        return KiviState(self, self.values_of(layer.shape.value_dim))

    def values_of(self, width: int) -> Int:
        """The format of V, whose groups divide its width."""
        return replace(self.values, group=math.gcd(self.group, width))

    def suits(self, keep, place) -> None:
        if keep.evicts:
            raise ValueError(
                f"kivi: keys are written in blocks of tokens, so {type(keep).__name__} cannot drop single "
                "ones; combine it with int2 or int4"
            )
        if place.on_host:
            raise ValueError("kivi: keys are written in blocks of tokens, which a host cannot fetch singly")

    def bits_per_value(self, shape: tuple[int, int, int], dtype: torch.dtype = torch.float16) -> float:
        """As in `Growing`, after a prompt of this many tokens, the window included."""
        heads, tokens, width = shape
        written = max(0, tokens - self.recent)
        if written == 0:
            return Exact().bits_per_value(shape, dtype)
        keys = self.format.bits + 32 * math.ceil(written / self.group) / written
        both = keys + self.values_of(width).bits_per_value((heads, written, width))
        return (both / 2 * written + dtype.itemsize * 8 * (tokens - written)) / tokens


class KiviState(GrowingState):
    """Codes: keys and values `[batch, kv_heads, written, width]` (V's with their scales), blocks: scale and
    zero point of K `[batch, kv_heads, blocks, head_dim]`. recents: K and V of the window `[batch, kv_heads,
    capacity, head_dim]`, of which the first `filled` tokens are there; recents_real `[batch, 1, capacity]`:
    which of them are no padding (None: all), true for those to come."""

    per_slot = ("recents", "recents_real")  # codes are final: see crop
    per_row = ("keys", "values", "blocks", *GrowingState.per_row)
    in_blocks = True

    def __init__(self, policy: Kivi, values: Int):
        super().__init__(policy)
        self.value_format = values
        self.group, self.recent = policy.group, policy.recent
        self.prompt = 0  # tokens of the first append

    @property
    def length(self) -> int:
        return self.written + self.filled

    @property
    def window(self) -> Parts | None:
        """K and V of the recent tokens."""
        return self.recents and tuple(side[:, :, : self.filled] for side in self.recents)

    @property
    def spare_bytes(self) -> int:
        held = [part for part in (*(self.recents or ()), self.recents_real) if part is not None]
        return sum(part[:, :, self.filled :].nbytes for part in held)

    @property
    def written(self) -> int:
        """Tokens that are quantized."""
        return 0 if self.keys is None else self.keys[0].shape[2]

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        batch, tokens = keys.shape[0], keys.shape[2]
        self.dtype = keys.dtype
        with naming("keys"), self.late[0].open():
            keys = self._admitted(self.format, keys)
        with naming("values"), self.late[1].open():
            values = self._admitted(self.value_format, values)
        end = self.filled + tokens
        if self.recents is None:
            self.prompt, self.recents = tokens, joined(None, (keys, values))
        else:
            self.reserve(tokens)
            for side, new in zip(self.recents, (keys, values), strict=True):
                side[:, :, self.filled : end] = new
        if real is not None:
            if self.recents_real is None:
                self.recents_real = real.new_ones(batch, 1, self.recents[0].shape[2])
            self.recents_real[:, 0, self.filled : end] = real
        self.filled = end
        if (due := self.due(self.length)) > 0:
            self._write(due)

    def due(self, length: int) -> int:
        """Tokens that are written as soon as it holds so many; a crop leaves written ones where they are."""
        past = (length - self.prompt) // self.group * self.group
        return self.prompt - self.recent + past - self.written

    def ends(self, tokens: int) -> list[int]:
        """Where to split a pass of several tokens, so that it sees the same as one token at a time: before
        and after every token that completes a block."""
        first = self.group - (self.length - self.prompt) % self.group
        full = [
            n for n in range(first, tokens + 1, self.group) if self.length + n - self.recent > self.written
        ]
        return sorted({tokens, *full, *(end - 1 for end in full)} - {0})

    def reserve(self, tokens: int) -> None:
        """Make room for more tokens in the window, at least until it overflows."""
        end = self.filled + tokens
        if end <= self.recents[0].shape[2]:
            return
        capacity = max(end, self.recent + self.group)
        self.recents = tuple(with_room(side, capacity) for side in self.window)
        if self.recents_real is not None:
            more = capacity - self.filled
            self.recents_real = pad(self.recents_real[:, :, : self.filled], (0, more), value=True)
        self.copies += self.filled

    def _admitted(self, form: Int, x: Tensor) -> Tensor:
        x, replaced = form.admit(x)
        self.replaced += replaced
        return x.to(self.dtype)

    def _write(self, count: int) -> None:
        """Quantize the oldest `count` tokens of the window: whole blocks, except for a short first one."""
        batch = self.window[0].shape[0]
        keys, values = (side[:, :, :count] for side in self.window)
        missing, real = -count % self.group, None  # tokens that a short first block lacks
        if self.recents_real is not None:
            real = pad(self.recents_real[:, 0, :count], (missing, 0))
        elif missing:
            real = pad(keys.new_ones(batch, count, dtype=torch.bool), (missing, 0))
        # K: every block of every row by itself, [batch * blocks, kv_heads, group, head_dim].
        lined = pad(keys.float(), (0, 0, missing, 0)).unflatten(2, (-1, self.group))
        lined = lined.transpose(1, 2).flatten(0, 1)
        numbers = self.format.fit(lined, None if real is None else real.reshape(-1, self.group))
        codes = self.format.quantize(lined, numbers).unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        numbers = tuple(n.squeeze(2).unflatten(0, (batch, -1)).transpose(1, 2) for n in numbers)
        self.blocks = joined(self.blocks, numbers)
        self.add((pack(codes[:, :, missing:], self.format.bits),), self.value_format.encode(values))
        self._change(self.per_slot, lambda side: side[:, :, count : self.filled].clone())
        self.filled -= count

    def add(self, keys: Parts, values: Parts) -> None:
        self.keys, self.values = joined(self.keys, keys), joined(self.values, values)

    def used(self) -> tuple[Parts | None, Parts | None]:
        return self.keys, self.values

    def contents(self) -> dict:
        found = super().contents()
        found["recents"] = self.window
        if self.recents_real is not None:
            found["recents_real"] = self.recents_real[:, :, : self.filled]
        return found

    def odd(self, batch: int, heads: int, slots: int, numbers: bool = True) -> str | None:
        found = super().odd(batch, heads, slots, numbers)
        if not found and self.recents_real is not None and self.recents_real.dtype != torch.bool:
            return f"recents_real is of {self.recents_real.dtype}"
        return found

    def read(self, device: torch.device) -> tuple[Tensor, Tensor]:
        recent = tuple(side.to(device) for side in self.window)
        if self.keys is None:
            return recent
        codes = unpack(self.keys[0].to(device), self.format.bits)
        short = (self.recent - self.prompt) % self.group  # tokens that the first block lacks
        block = (torch.arange(self.written, device=device) + short) // self.group
        scales = [n.to(device).index_select(2, block) for n in self.blocks]
        values = self.value_format.decode(tuple(part.to(device) for part in self.values), self.dtype)
        return joined((self.format.numbers(codes, scales, self.dtype), values), recent)

    def check_crop(self, length: int) -> None:
        if length < self.written:
            raise ValueError(
                f"crop: {self.written} tokens are written in blocks and cannot be taken back to {length}; "
                "start again with cache.reset()"
            )

    def crop(self, length: int) -> None:  # by hand: a token written in a block has no slot of its own
        self.check_crop(length)
        super().crop(length - self.written)
        if self.recents_real is not None:
            self.recents_real[:, :, self.filled :] = True
