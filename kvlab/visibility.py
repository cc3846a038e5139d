"""Visibility: which tokens a query may see, by transformers' mask function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .foreign import NoTensor


class Visibility(NoTensor):
    """The tokens visible to a pass in layers of one kind: the caller's padding, and the model's rule.

    The attention function gets it instead of a mask, and no mask is built if every token held is visible.
    rule: the model's mask function, (row, head, query, key) -> bool, on indices that may be tensors; None:
    every key that is not later than the query. local: the sliding window, or the chunk, of the rule (None: no
    limit); tokens hidden from the next query are hidden from all later ones. padding: bool `[batch, tokens
    seen + new]`, False for padding, or None. known: False for any other rule.
    """

    ndim = 4  # as that of a finished mask: transformers then hands it on

    def __init__(self, padding: Tensor | None = None, rule: Callable | None = None,
                 local: int | None = None, known: bool = True):  # fmt: skip
        self.padding, self.rule, self.local, self.known = padding, rule, local, known
        self._found = self._shift = None

    def __deepcopy__(self, memo) -> Visibility:
        return self  # nothing in it changes with the tokens

    @classmethod
    def of(cls, *, attention_mask=None, mask_function, allow_is_causal_skip=False, **others) -> Visibility:
        """From the arguments of transformers' AttentionMaskInterface: `allow_is_causal_skip` means that the
        rule is causal, within `local_size` tokens if that is given."""
        if isinstance(attention_mask, Visibility):
            return attention_mask
        local = others.get("local_size")
        rule = None if local is None and allow_is_causal_skip else mask_function
        return cls(attention_mask, rule, local, allow_is_causal_skip)

    def real(
        self, batch: int, tokens: int, seen: int, before: list[int] | None = None
    ) -> tuple[Tensor | None, list[int]]:
        """Which new tokens are real, bool `[batch, tokens]` or None if all are, and their number per row.

        before: how many of the tokens seen were real, per row (None: not compared). ValueError if the padding
        mask is not `[batch, tokens seen + new]`, or has another number of them. Computed once per pass.
        """
        if self.padding is None:
            return None, [tokens] * batch
        if self._found is not None and self._found[0] == (seen, tokens):
            return self._found[1]
        if tuple(self.padding.shape) != (batch, seen + tokens):
            raise ValueError(
                f"attention_mask has shape {tuple(self.padding.shape)}: expected [batch, tokens seen + new] "
                f"= {(batch, seen + tokens)}"
            )
        now = self.padding[:, :seen].bool().sum(-1).tolist()
        if before and now != before:
            raise ValueError(
                f"attention_mask: {now} of the {seen} tokens before this pass are real, by row, and {before} "
                "were when they came; a cache hides no token later"
            )
        real = self.padding[:, seen:].bool()
        counts = real.sum(-1).tolist()
        found = (None, [tokens] * batch) if min(counts) == tokens else (real, counts)
        self._found = (seen, tokens), found
        return found

    def positions(self, new: Tensor, seen: int = 0) -> Tensor:
        """Position of every token of `new` `[batch, heads, tokens, ...]` among the row's own new ones, -1 for
        padding, `[batch, tokens]`."""
        real, _ = self.real(len(new), new.shape[2], seen)
        if real is not None:
            return own_positions(real)
        return torch.arange(new.shape[2], device=new.device).expand(len(new), -1)

    def first(self, tokens: int) -> Visibility:
        """The same, of a pass that ends with so many tokens."""
        padding = None if self.padding is None else self.padding[:, :tokens]
        return Visibility(padding, self.rule, self.local, self.known)

    def allowed(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys a query may see, bool `[batch, 1 or kv_heads, q, slots]`.

        queries `[batch, q]`, keys `[batch, 1 or kv_heads, slots]` are positions among the row's real tokens,
        -1 for padding. A padding query sees everything, so that its (unused) output stays finite.
        """
        queries, keys = queries[:, None, :, None], keys[:, :, None, :]
        seen = (keys >= 0) & (keys <= queries)
        if self.rule is not None:
            shift = self._columns(queries)
            rows = torch.arange(len(queries), device=queries.device).view(-1, 1, 1, 1)
            seen = seen & self.rule(rows, rows[:1], queries + shift, keys + shift)
        return seen | (queries < 0)

    def _columns(self, like: Tensor) -> Tensor | int:
        """Add this to a position to have its column, where transformers' rules count: the padding on the
        left, `[batch, 1, 1, 1]`."""
        if self.padding is None:
            return 0
        if self._shift is None:
            left = (self.padding.to(like.device).cumsum(-1) == 0).sum(-1)
            self._shift = left.view(-1, 1, 1, 1)
        return self._shift

    def kept(self, lengths: list[int], positions: Tensor, last: int = 0) -> Tensor:
        """Which tokens later queries, and the `last` ones so far, may see, bool like `positions` `[batch,
        1 or kv_heads, slots]`; the newest of a row always. lengths: real tokens seen, per row."""
        first = (torch.tensor(lengths, device=positions.device).view(-1, 1) - last).clamp(min=0)
        return self.allowed(first, positions)[:, :, 0] | (positions >= first[..., None] - 1)

    def contiguous(self) -> Visibility:
        """As a finished mask has it: transformers asks before it hands one on."""
        return self


CAUSAL = Visibility()  # no padding, and every token that is not later


def own_positions(mask: Tensor) -> Tensor:
    """Position of every token among its row's real tokens, -1 for padding; `[batch, tokens]` -> same."""
    real = mask.bool()
    return (real.long().cumsum(-1) - 1).masked_fill(~real, -1)
