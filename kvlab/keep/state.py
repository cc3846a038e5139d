"""State: the memory of a keep for one layer, and the last queries of a prompt in several passes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..late import Late
from ..policy import State


class KeepState(State):
    """The memory of a keep for one layer.

    limits: tokens that each row may hold, a list, known when the prompt has ended; longest: the same for its
    largest head; goal: `limits`, if it compresses only now and then; shares `[batch, kv_heads]`: if heads
    differ; threshold `[batch, kv_heads]`: see `merging.merge`. last: see `LastQueries`. ids, real `[batch,
    tokens]`, next `[batch]`: the prompt, until it is read again (`reread.py`). late: refuses a score on a
    GPU.
    """

    per_row = ("limits", "longest", "goal", "shares", "threshold", "ids", "real", "next")
    states = ("last",)
    shared = ("late",)
    on_top = False  # True: later tokens are held on top of the budget (`KVCache.hold`)
    lags = property(lambda self: self.on_top or self.policy.prompt_only, doc="It is told of no new slots.")

    def __init__(self, policy):
        super().__init__(policy, policy)
        self.last, self.late = LastQueries(policy), Late()

    def odd(self, batch: int, heads: int, slots: int, numbers: bool = True) -> str | None:
        by_head = {name: getattr(self, name) for name in ("shares", "threshold")}
        fits = lambda x: x is None or (isinstance(x, Tensor) and x.shape == (batch, heads))
        odd = [name for name, x in by_head.items() if not fits(x)]
        return f"{odd[0]} is of another shape" if odd else super().odd(batch, heads, slots, numbers)

    def cover(self, slots: int) -> None:
        """Extend the state to `slots` slots, before some go: those that `observe` has not covered are
        zero."""

        def covered(x: Tensor) -> Tensor:
            new = slots - x.shape[2]
            return torch.cat([x, x.new_zeros(*x.shape[:2], new, *x.shape[3:])], 2) if new > 0 else x

        self._change(self.per_slot, covered)


class LastQueries(State):
    """The last `last_queries` queries of a prompt that comes in several passes; they vote when it has ended.

    query `[batch, heads, n, head_dim]`, positions `[batch, n]` (-1: padding), received `[batch, kv_heads,
    slots]`: what tokens would receive if the prompt ended here, where this cannot be computed later
    (`LatentLayer`); None until queries come.
    """

    per_row, per_slot = ("query", "positions"), ("received",)

    def note(self, query: Tensor, positions: Tensor) -> None:
        """The queries of one more pass `[batch, heads, tokens, head_dim]`, and their positions."""
        if self.query is not None:
            query = torch.cat([self.query, query], dim=2)
            positions = torch.cat([self.positions, positions], dim=1)
        newest = positions.argsort(dim=1)[:, -self.policy.last_queries :]  # each row's own, padding first
        rows = torch.arange(len(query), device=query.device)[:, None]
        self.query = query.transpose(1, 2)[rows, newest].transpose(1, 2)
        self.positions = positions.gather(1, newest)

    def votes(self, keys: Tensor, positions: Tensor, given) -> Tensor:
        """The attention that tokens received from these queries, `[batch, kv_heads, slots]`: summed where the
        keys `[batch, kv_heads, slots, head_dim]` are. given: a pass of the prompt (`attention.Recorded`)."""
        query, asked, offered = (x.to(keys.device) for x in (self.query, self.positions, positions))
        sinks = None if given.sinks is None else given.sinks.to(keys.device)
        allowed = given.visibility.allowed(asked, offered)
        _, received = replace(given, query=query, sinks=sinks).attend_to(keys, None, allowed, asked >= 0)
        return received.to(self.query.device)

    def forget(self) -> None:
        """Forget the queries after they have voted."""
        self.query = self.positions = self.received = None
