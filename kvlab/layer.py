"""Layer: one layer of a cache, where a keep, a store and a place work together at every pass."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from . import faster
from .attention import Recorded, observed
from .contents import Contents
from .merging import merge
from .models import renumbered, rotation_of
from .modes import kept
from .policy import View
from .ranks import added
from .reread import attend_again
from .telling import blaming
from .turns import chosen, keep_raw, wait
from .visibility import Visibility

SPARE = 16  # slots behind a window that are dropped together, if nothing is chosen or fetched


class Layer(Contents):
    """One layer of a KVCache: append -> read -> attend -> observe -> evict.

    `keep`, `store` and `place` are states; the parameters of each are its `policy`. The place stands between
    the layer and the store: `write` stores new K and V, `append` shows it the new keys, `read` returns what
    the pass attends to, `finish` ends the pass, and `commit` and `flush` finish writes that are under way
    (`place/device.py`, where all of these are one line or nothing).
    """

    def attend(
        self, query: Tensor, visibility: Visibility, scaling: float, softcap: float | None = None,
        sinks: Tensor | None = None, made: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Append the K and V that `update` took, attend, and let the keep decide. Shapes as in
        `attention.attend`; made: K and V, if the model makes them of what `update` returned (`latent.py`)."""
        self.check_mask(visibility)
        numbers = self.in_its_dtype(query, *(made or self._pending))
        given, device = Recorded(*numbers, visibility, scaling, softcap, sinks), query.device.type
        if not torch.is_autocast_enabled(device):
            return self._attend(given).to(query.dtype)
        with torch.autocast(device, enabled=False):
            return self._attend(given).to(query.dtype)

    def in_its_dtype(self, *numbers: Tensor) -> tuple[Tensor, ...]:
        """A pass's numbers in the dtype of the layer's first pass, which autocast chose if it was on; it may
        come and go later. ValueError for numbers of two dtypes, or of another one than before."""
        device, kinds = numbers[0].device.type, {x.dtype for x in numbers}
        autocast = torch.is_autocast_enabled(device)
        if len(kinds) > 1 and not autocast:
            kinds = ", ".join(sorted(map(str, kinds)))
            raise ValueError(
                f"layer {self.index}: q, k and v are of {kinds}: expected one dtype, or autocast"
            )
        if self.dtype is None or (self.seen == 0 and self.raw is None):
            chosen = autocast and torch.float64 not in kinds
            self.dtype = torch.get_autocast_dtype(device) if chosen else max(kinds, key=lambda x: x.itemsize)
            self.autocast = autocast
        if not autocast and not self.autocast and self.dtype not in kinds:
            raise ValueError(
                f"layer {self.index}: K is {numbers[-1].dtype}, but the cache was filled in {self.dtype}: "
                "make a new one"
            )
        return tuple(kept(x.to(self.dtype)) for x in numbers)

    def check_mask(self, visibility: Visibility) -> None:
        if not visibility.known:
            raise ValueError(
                f"layer {self.index}: {type(self.model).__name__} attends by a mask of its own, which kvlab "
                "caches do not know"
            )

    @blaming
    def _attend(self, given: Recorded) -> Tensor:
        """A prompt that is read again, a piece that waits for others, a whole prompt, or a pass on top of the
        tokens held, which compiled code may take."""
        self._pending = None
        if self.rereading is not None:
            return attend_again(self, given)
        if self.waits:
            return wait(self, given)
        if self.seen == 0:
            out, received = given.attend(self.observes and not self.votes_later, self.last_queries)
            self.fill(given, received)
            keep_raw(self, given)
            return out
        if (out := faster.step(self, given)) is not None:
            return out
        if given.keys.shape[2] == 1 or not self.store.in_blocks:
            return self._pass_on_held(given)
        ends = self.store.ends(given.keys.shape[2])
        return torch.cat([self._pass_on_held(given.part(*cut, self.seen)) for cut in pairwise([0, *ends])], 2)

    def _pass_on_held(self, given: Recorded) -> Tensor:
        """A pass on top of the tokens held."""
        query = given.query
        self.append(given)
        self.place.append(self, given.keys)
        with self.timed("attention"):
            out, received = self._read_and_attend(query)
            self.end_pass(received)
        return out

    def taken(self, scaling: float, left: Tensor | None = None) -> None:
        """Compiled code has written one token of every row to the store, and attended; left: positions of the
        tokens held now `[batch, kv_heads, slots]`, if one token of every head was dropped too."""
        self.table.advance(left)
        self.moved_bytes = 0
        if self.given.scaling != scaling:
            self.given = replace(self.given, scaling=scaling)

    def fill(self, given: Recorded, received: Tensor | None = None) -> None:
        """Take a whole prompt whose attention has been computed. Only for an empty layer.

        received `[batch, kv_heads, tokens]` if the layer `observes` (over the keep's `last_queries`).
        """
        self.append(given)
        self.place.prefill(self, given.query.detach(), given.keys)
        self.end_pass(received)

    def fill_pieces(self, given: Recorded) -> None:
        """`fill` with a prompt that came in pieces, `given` as one pass."""
        self.fill(given, given.received(self.last_queries) if self.observes else None)

    def append(self, given: Recorded) -> None:
        """A pass begins: append its K and V. ValueError for those that do not fit."""
        self.given, self.moved_bytes, self.is_initialized = given, 0, True
        batch, heads, tokens, width = given.keys.shape
        if not self.lengths and heads * self.ranks == self.shape.kv_heads:
            self.kv_heads = self.table.kv_heads = heads  # all of them, or this process's
        if (heads, width) != (self.kv_heads, self.shape.head_dim):
            raise ValueError(
                f"layer {self.index}: K has {heads} heads of {width}, but the configuration of "
                f"{type(self.model).__name__} says {self.kv_heads} of {self.shape.head_dim}"
            )
        real, counts = given.visibility.real(batch, tokens, self.seen, self.lengths)
        if given.visibility.local is None:  # the configuration has a window, this pass's mask does not
            self.local = None
        self._busy, held, before = True, self.store.length, self.store.memory()
        if real is not None:  # padding's numbers are nobody's: no format shares a scale with them, or refuses
            padding = ~real[:, None, :, None]
            self.given = given = replace(
                given, **{name: getattr(given, name).masked_fill(padding, 0) for name in ("keys", "values")}
            )
        try:
            self.place.write(self, given.keys, given.values, real)
        except ValueError as error:
            if held and self.store.length == held:  # nothing was written: the text can go on
                for state, values in before:
                    vars(state).update(values)
                self._busy = False
            raise ValueError(f"layer {self.index}: {error}") from error.__cause__
        self.table.append(real, counts, tokens, given.keys.device)

    def _read_and_attend(self, query: Tensor):
        """(Output `[batch, heads, tokens, head_dim]`, what held tokens received where a keep observes)."""
        given, observes = self.given, self.observes and not self.votes_later
        held, self.fetched = self.place.read(self, query.detach())
        if self.on_read is not None:
            self.on_read(self, held, self.fetched, query)
        allowed, asked = self.table.visible(
            query.shape[2], self.fetched, given.visibility, self.place.complete
        )
        renumber = self.evicts and self.keep.policy.renumber
        plain, found = given.softcap is None and given.sinks is None and not renumber, None
        if plain:
            found = faster.attention(query, held, given.scaling, allowed, observes)
        if found is not None:
            out, received = found
            if observes and asked is not None:
                received.masked_fill_(~self.counted(asked)[..., None], 0.0)
        else:
            keys, values = held.read(query.device)
            if renumber:
                keys = renumbered(self.rotation, keys, self.table.positions, self.fetched)
            out, received = given.attend_to(keys, values, allowed, self.counted(asked) if observes else None)
        self.place.finish(self)
        if observes and self.fetched is not None:
            full, there = received.new_zeros(*received.shape[:2], self.slots), self.fetched >= 0
            received = full.scatter_add_(2, self.fetched.clamp(min=0), received.masked_fill(~there, 0.0))
        return out, received

    @cached_property
    def rotation(self):
        """How the model rotates this layer's keys, asked once for each cache."""
        return rotation_of(self)

    def counted(self, asked: Tensor | None) -> Tensor:
        """Which of a step's queries the keep observes, `[batch, queries]`; asked: see `Slots.visible`."""
        if asked is None:
            return torch.ones(len(self.lengths), 1, dtype=torch.bool, device=self.given.query.device)
        return observed(asked, asked.amax(-1, keepdim=True), self.last_queries)

    def end_pass(self, received: Tensor | None) -> None:
        """The pass has attended: the keep observes and, if the prompt has ended, decides."""
        self.observe(received)
        if not self.held_back:
            self._evict()
        elif self.local is not None:
            self._leave_window()
        self.ended()

    def observe(self, received: Tensor | None) -> None:
        """Tell the keep about the pass that has attended, with `received` `[batch, kv_heads, slots]` if it
        observes."""
        if self.keep.policy.reads_queries and self.asks:
            self.keep.policy.note(View(self, self.keep), self.given.query.detach())
        if received is not None:
            self.keep.policy.observe_and_check(View(self, self.keep), received.detach())
        elif self.votes_later:
            self.note_queries()

    @blaming
    def end_prefill(self) -> None:
        """The prompt has ended, after any number of passes: do what was held back."""
        if self.in_prompt and self.lengths:
            self._busy = True
            self.place.end_prefill(self)
            self._evict()
            self.ended()

    def ended(self) -> None:
        """Keep only the numbers of `given` and, while the prompt is open, the tensors for a vote."""
        given, self._busy, self.fetched = self.given, False, None
        votes = (given.visibility, given.sinks) if self.held_back else (None, None)
        self.given = Recorded(None, None, None, votes[0], given.scaling, given.softcap, votes[1])

    def _evict(self) -> None:
        """After the prompt and every later pass: drop tokens that no query will see, and let the keep
        decide."""
        policy, view = self.keep.policy, View(self, self.keep)
        evicts = self.asks
        if evicts:
            self.place.commit(self)
            if self.keep.last.query is not None:
                policy.observe_and_check(view, self.late_votes())
                self.keep.last.forget()
            elif not policy.observes:
                policy.observe_and_check(view, None)
        if self.local is not None:
            self._leave_window()
        slots, most = chosen(self, view) if evicts else (None, None)
        if slots is not None:
            if self.in_prompt:  # what a report says beside the answers
                self.scored = scored(slots, policy.held_by_rule(view), self.ranks)
            if policy.merge:
                merge(self, slots.expand(len(self.lengths), self.kv_heads, -1))
            self.let_go(slots, most)
        self.in_prompt = False
        if self.settled:
            self.store.settle()

    def note_queries(self) -> None:
        """Hold the pass's last queries until the prompt has ended."""
        query = self.given.query.detach()
        self.keep.last.note(query, self.table.positions[:, 0, -query.shape[2] :])

    def late_votes(self) -> Tensor:
        """The attention received from the prompt's last queries, now that it has ended, `[batch, kv_heads,
        slots]`."""
        where = torch.device("cpu") if self.place.on_host else self.keep.last.query.device
        return self.keep.last.votes(self.store.read(where)[0], self.slot_positions, self.given)

    def _leave_window(self) -> None:
        """Drop tokens that neither later queries nor those that vote after the prompt can see."""
        prompt = self.open or self.in_prompt or self.given.query.shape[2] > 1
        spare = 0 if prompt or self.evicts or self.place.on_host else SPARE
        voters = self.last_queries if self.votes_later else 0
        ragged = getattr(self.store.policy, "takes_ragged", False)
        if gone := self.table.leave_window(self.given.visibility, voters, spare, ragged):
            self.let_go(*gone)

    def let_go(self, slots: Tensor, limits: list[int]) -> None:
        """Drop everything except `slots` `[batch, kv_heads, n]` (-1: nothing); at most `limits` per row
        stay."""
        if self.slots - max(limits) < self.place.empties(self):
            self.table.leave(slots, limits, self.keep.policy.newest_stays)
            return
        self.place.flush(self)
        self.keep.cover(self.slots)
        self.table.keep(slots, limits, self.keep.policy.newest_stays)
        self.keep.keep_slots(slots)
        self.store.keep_slots(slots)
        self.place.keep_slots(slots)

    @property
    def settled(self) -> bool:
        """Whether the prompt has ended, and no held token will be dropped or chosen from."""
        return not (self.in_prompt or self.local is not None or self.asks)

    @property
    def asks(self) -> bool:
        """Whether the keep is told of this pass, and chooses: not if it keeps all, not on top of what `hold`
        holds, and after the prompt only if it may drop more."""
        done = self.keep.on_top or (self._policies[0].prompt_only and not self.in_prompt)
        return self.evicts and not done

    @property
    def observes(self) -> bool:
        """Whether the keep needs the attention that every token receives in this pass."""
        return self._policies[0].observes and self.asks

    @property
    def last_queries(self) -> int | None:
        """The number of a pass's last queries that the keep observes; None: all."""
        return self._policies[0].last_queries

    @property
    def votes_later(self) -> bool:
        """Whether the last queries of a prompt in several passes are held, to vote when it has ended."""
        later = self.in_prompt and (self.prefilling or self.keep.last.query is not None)
        return later and self.observes and self.last_queries is not None


def scored(slots: Tensor, by_rule: Tensor, ranks: int) -> float:
    """The share of `slots` `[batch, kv_heads, n]` (-1: none), in all processes that share the heads, that the
    score chose and no rule held."""
    held = slots >= 0
    chosen = held & ~by_rule.gather(-1, slots.clamp(min=0))
    chosen, of_all = added(ranks, [int(chosen.sum()), int(held.sum())])
    return chosen / max(of_all, 1)
