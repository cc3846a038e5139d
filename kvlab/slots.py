"""Slots: which token of the text is in which slot of a layer, for each row and head."""

from __future__ import annotations

import torch
from torch import Tensor

from .gather import among, gather_slots, in_order
from .visibility import Visibility


class Slots:
    """Positions and counts of a layer's tokens; its store holds the numbers in the same slots.

    count: slots in use. seen: tokens fed so far, padding included. lengths: real tokens seen, per row.
    rows_held: real tokens held, per row. moved: positions `[batch, 1 or kv_heads, slots]`, -1 for none, or
    None while slot j holds token j in every row. newest: whether every head holds the newest token of a row.
    aligned: whether the last slots hold what was fed last, in every row. fed: real tokens of the last pass.
    """

    def __init__(self, kv_heads: int):
        self.kv_heads = kv_heads
        self.count = self.seen = 0
        self.lengths: list[int] = []
        self.rows_held: list[int] = []
        self.fed: list[int] = []
        self.moved: Tensor | None = None
        self.newest = self.aligned = True
        self.device: torch.device | None = None

    @property
    def positions(self) -> Tensor:
        """Position of the token in every slot, `[batch, kv_heads, slots]`, -1 for none."""
        shape = (len(self.lengths), self.kv_heads, self.count)
        if self.moved is not None:
            return self.moved.expand(shape)
        return torch.arange(self.count, device=self.device, dtype=torch.int32).expand(shape)

    def append(self, real: Tensor | None, counts: list[int], tokens: int, device: torch.device) -> None:
        """Take `tokens` new slots; real bool `[batch, tokens]` or None: which of them hold a token; counts:
        how many, per row."""
        self.device, self.fed = device, counts
        before = self.lengths or [0] * len(counts)
        if real is not None or self.moved is not None:
            self._append_positions(len(before), real, tokens)
        self.newest |= real is None or min(counts) > 0
        held = self.rows_held or [0] * len(counts)
        self.lengths = [old + new for old, new in zip(before, counts, strict=True)]
        self.rows_held = [old + new for old, new in zip(held, counts, strict=True)]
        self.seen += tokens
        self.count += tokens

    def advance(self, left: Tensor | None = None) -> None:
        """One more token in every row, each in its next slot; left: positions of the tokens then held, if one
        token of every head was dropped at once."""
        if left is not None:
            self.moved, self.count = left, left.shape[2]
        else:
            if self.moved is not None:
                self._append_positions(len(self.lengths), None, 1)
            self.newest = True
            self.rows_held = [held + 1 for held in self.rows_held]
            self.count += 1
        self.lengths, self.fed = [seen + 1 for seen in self.lengths], [1] * len(self.lengths)
        self.seen += 1

    def _append_positions(self, batch: int, real: Tensor | None, tokens: int) -> None:
        moved = self.moved
        if moved is None:  # until now, slot j held token j
            moved = torch.arange(self.count, device=self.device, dtype=torch.int32).expand(batch, 1, -1)
        if not self.newest:
            start = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)[:, None]
        else:  # equivalent, but a copy of `lengths` to a GPU would wait
            start = moved[:, 0].amax(-1, keepdim=True) + 1 if moved.shape[2] else 0
        if real is None:
            new = start + torch.arange(tokens, device=self.device, dtype=torch.int32).expand(batch, -1)
        else:
            new = (start + real.cumsum(-1, dtype=torch.int32) - 1).masked_fill(~real, -1)
        new = new.unsqueeze(1).expand(-1, moved.shape[1], -1)
        self.moved = torch.cat([moved, new], dim=2)

    def keep(self, slots: Tensor, limits: list[int], newest: bool = True) -> None:
        """Only `slots` `[batch, kv_heads, n]` stay (-1: nothing), at most `limits` per row, with or without
        the newest token of every row."""
        self.moved, self.newest = self.gathered(slots), newest
        self.count = slots.shape[2]
        self.rows_held = [min(pair) for pair in zip(self.rows_held, limits, strict=True)]

    def leave(self, slots: Tensor, limits: list[int], newest: bool = True) -> None:
        """As `keep`, but dropped tokens leave their slots behind, empty."""
        goes = ~among(slots, self.count)
        self.moved, self.newest = self.positions.masked_fill(goes, -1), newest
        self.rows_held = [min(pair) for pair in zip(self.rows_held, limits, strict=True)]

    def empty(self, slots: Tensor) -> None:
        """Drop one token of every head, in slot `slots` `[batch, kv_heads]`, which stays, empty."""
        self.moved = self.positions.clone().scatter_(2, slots[..., None], -1)
        self.rows_held = [held - 1 for held in self.rows_held]

    def leave_window(self, visibility: Visibility, last: int, spare: int, ragged: bool):
        """Drop tokens that neither later queries nor the `last` ones see.

        Up to `spare` of their slots stay, empty. With more, returns the slots to gather, `[batch, kv_heads,
        n]` (-1: nothing, in front of a row's tokens, or behind a head's if the store is `ragged`), and how
        many each row (the head that has most) holds of them; else None.
        """
        if max(self.lengths) < visibility.local:
            return None
        positions = self.positions if self.moved is None else self.moved
        stays = visibility.kept(self.lengths, positions, last) & (positions >= 0)
        held = stays.sum(-1).amax(-1).tolist()
        if max(held) == self.count and bool(stays.all()):
            return None
        if self.count - max(held) <= spare:
            self.moved, self.rows_held = positions.masked_fill(~stays, -1), held
            return None
        at, slots = torch.arange(self.count, device=stays.device), in_order(stays)
        if not ragged:
            slots = slots.sort(dim=-1).values
        self.aligned &= bool(((slots == at[-max(held) :]) | (slots < 0)).all())
        return slots.expand(-1, self.kv_heads, -1), held

    def select_rows(self, rows: Tensor) -> None:
        """Row i becomes a copy of the old row `rows[i]`."""
        if self.moved is not None:
            self.moved = self.moved.index_select(0, rows.to(self.moved.device))
        self.lengths = [self.lengths[row] for row in rows.tolist()]
        self.rows_held = [self.rows_held[row] for row in rows.tolist()]

    def crop(self, slots: int, length: int) -> None:
        """Keep the first `slots`, the first `length` tokens of a layer that has evicted none."""
        self.count, self.seen = slots, length
        self.lengths = [length] * len(self.lengths)
        if self.moved is not None:
            self.moved = self.moved[..., :slots].clone()
            self.lengths = (self.moved[:, 0] >= 0).sum(-1).tolist()
        self.rows_held = list(self.lengths)

    def gathered(self, slots: Tensor) -> Tensor:
        """Positions of some slots `[batch, kv_heads, n]` (-1: none)."""
        return gather_slots(self.positions, slots).masked_fill(slots < 0, -1)

    def visible(self, queries: int, slots: Tensor | None, visibility: Visibility, complete: bool = False):
        """The keys in `slots` (None: all) that the newest `queries` tokens may attend to: (allowed, positions
        of the queries), see `Visibility.allowed`; (None, None) if one query may see everything. complete:
        whether certainly no slot is -1."""
        untouched = self.moved is None and queries == 1 and visibility.rule is None
        if untouched and (slots is None or complete or bool((slots >= 0).all())):
            return None, None
        positions = self.positions if self.moved is None else self.moved
        asked = positions[:, 0, -queries:]
        offered = positions if slots is None else self.gathered(slots)
        return visibility.allowed(asked, offered), asked
