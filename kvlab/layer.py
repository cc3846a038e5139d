"""Layer: one layer of a cache, in which a keep, a store and a place work together at every pass."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .attention import Recorded, attend
from .keep.base import LastQueries
from .kernels import attend_packed, fits
from .models import ModelShape
from .models.shape import other_model
from .policy import View
from .slots import Slots
from .visibility import Visibility


def _of_table(name: str, what: str) -> property:
    """A property of the layer that its `table` knows."""
    return property(lambda layer: getattr(layer.table, name), doc=what)


class Layer(CacheLayerMixin):
    """One layer of a KVCache: append -> read -> attend -> observe -> evict.

    index: of the layer in the model. order: its place among those that attend. local: its sliding window or
    chunk, None where it attends to everything; tokens that no later query sees are let go. policies: keep,
    store, place; `keep`, `store` and `place` are their states. table: `Slots`. timeline: a
    `measure.timeline.Timeline` while somebody records. on_read: called as on_read(layer, held, slots, query)
    with what a step is about to attend to, all of it where slots is None.
    """

    is_sliding = False

    def __init__(self, index: int, order: int, policies, shape: ModelShape, model, local: int | None = None):
        self.index, self.order, self.local = index, order, local
        self.shape, self.kv_heads = shape, shape.kv_heads
        self.prefilling = False  # True inside `cache.prefill()`: nothing is evicted yet
        self.timeline = self.on_read = None
        self._policies, self._model, self._attention = policies, weakref.ref(model), None
        self.place = None
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        if self.place is not None:
            self.place.drop()
        self.table = Slots(self.kv_heads)
        self.keep, self.store, self.place = (policy.start(self) for policy in self._policies)
        self._pending: tuple[Tensor, Tensor] | None = None  # K and V that wait for the attention function
        self.fetched: Tensor | None = None  # while a step evicts: slots it attended to, None for all
        self.scaling, self.softcap, self.moved_bytes = 1.0, None, 0
        self.sinks: Tensor | None = None  # the model's, see `kvlab_attention`
        self.in_prompt = True  # until the prompt has ended
        self._visibility: Visibility | None = None  # of the pass that runs, or of the prompt's last
        self.is_initialized = self._busy = False

    def __deepcopy__(self, memo) -> Layer:
        """A layer of its own with the same tokens, which nobody watches, outside any `prefill` block."""
        memo[id(self)] = twin = object.__new__(type(self))
        own = {"timeline": None, "on_read": None, "prefilling": False}
        vars(twin).update(copy.deepcopy({**vars(self), **own}, memo))
        return twin

    # What transformers calls.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Take the new K and V `[batch, kv_heads, tokens, head_dim]`; returns the layer, twice."""
        self.is_initialized = True
        self._pending = key_states.detach(), value_states.detach()
        return self, self

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots + query_length, self.seen - self.slots

    def get_max_length(self) -> int:
        return self.store.max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of the old row `beam_idx[i]`; any number of rows (a fork) is allowed."""
        if self.lengths:
            self.place.flush(self)
            for part in (self.keep, self.store, self.place, self.table):
                part.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(len(self.lengths)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. ValueError where an eviction cannot be undone."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected a negative number of tokens to remove")
        if tokens_to_remove == 0 or not self.lengths:
            return
        left = max(0, self.seen + tokens_to_remove)
        self.check_crop(left)
        if left == 0:
            self.reset()
            return
        self.place.flush(self)
        for part in (self.store, self.place, self.table):
            part.crop(left)

    def check_crop(self, left: int) -> None:
        """ValueError where what was held at `left` tokens cannot be had again."""
        if self.keep.policy.evicts:
            gone = f"{type(self.keep.policy).__name__} has evicted tokens"
        elif left and self.rows_held != self.lengths:
            gone = "the window has left tokens behind"
        else:
            return
        raise ValueError(f"crop: {gone} that were held at that point; start again with cache.reset()")

    # The path of one pass.

    def attend(
        self, query: Tensor, visibility: Visibility, scaling: float, softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Append what `update` took, attend, and let the keep decide. Shapes as in `attention.attend`."""
        (keys, values), self._pending = self._pending, None
        self._check_whole()
        if not visibility.known:
            raise ValueError(
                f"layer {self.index}: {type(self.model).__name__} attends by a mask of its own, which kvlab "
                "caches do not know"
            )
        if self.seen == 0:
            given = Recorded(query, keys, values, visibility, scaling, softcap, sinks)
            watches = self.watches and not self._votes_later
            out, received = given.attend(watches, self.keep.policy.last_queries)
            self.fill(given, received)
            return out
        self.scaling, self.softcap, self.sinks = scaling, softcap, sinks
        self.moved_bytes, self._busy = 0, True
        self._append(keys, values, visibility)
        self.place.append(self, keys)
        with self.timed("attention"):
            out, received = self._read_and_attend(query, visibility)
            self._end_pass(query, received, visibility)
        self._busy, self.fetched = False, None
        return out

    def fill(self, given: Recorded, received: Tensor | None = None) -> None:
        """Take a whole prompt whose attention has been computed. Only for an empty layer.

        received `[batch, kv_heads, tokens]` where the layer `watches` (over the keep's `last_queries`).
        """
        self.is_initialized, self.moved_bytes = True, 0
        self.scaling, self.softcap, self.sinks = given.scaling, given.softcap, given.sinks
        self._append(given.keys, given.values, given.visibility)
        self.place.prefill(self, given.query.detach(), given.keys)
        self._end_pass(given.query, received, given.visibility)

    def _append(self, keys: Tensor, values: Tensor, visibility: Visibility) -> None:
        batch, _, tokens, _ = keys.shape
        if self.lengths and batch != len(self.lengths):
            raise ValueError(f"batch of {batch} rows, but the cache holds {len(self.lengths)}: use reset()")
        found, expected = (keys.shape[1], keys.shape[3]), (self.kv_heads, self.shape.head_dim)
        if found != expected:
            raise ValueError(
                f"layer {self.index}: K has {found[0]} heads of {found[1]}, but the configuration of "
                f"{type(self.model).__name__} says {expected[0]} of {expected[1]}"
            )
        real, counts = visibility.real(batch, tokens, self.seen)
        if visibility.local is None:
            self.local = None
        try:
            self.place.write(self, keys, values, real)
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None
        self.table.append(real, counts, tokens, keys.device)

    def _read_and_attend(self, query: Tensor, visibility: Visibility):
        """(Output `[batch, heads, tokens, head_dim]`, what held tokens received where a keep watches)."""
        held, self.fetched = self.place.read(self, query.detach())
        if self.on_read is not None:
            self.on_read(self, held, self.fetched, query)
        allowed, asked = self.table.visible(query.shape[2], self.fetched, visibility)
        watches = self.watches and not self._votes_later
        plain = self.softcap is None and self.sinks is None
        if plain and not watches and fits(held, query):
            out, received = attend_packed(query, held, self.scaling, allowed), None
        else:
            watch = self._watched(query, asked) if watches else None
            numbers = held.read(query.device)
            out, received = attend(
                query, *numbers, self.scaling, allowed, watch, softcap=self.softcap, sinks=self.sinks
            )
        self.place.finish(self)
        if watches and self.fetched is not None:
            full, there = received.new_zeros(*received.shape[:2], self.slots), self.fetched >= 0
            received = full.scatter_add_(2, self.fetched.clamp(min=0), received.masked_fill(~there, 0.0))
        return out, received

    def _watched(self, query: Tensor, asked: Tensor | None) -> Tensor:
        """Which of a step's queries the keep watches, `[batch, queries]`."""
        if asked is None:
            return torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        last = self.keep.policy.last_queries
        newest = asked.amax(-1, keepdim=True)
        return (asked >= 0) if last is None else (asked >= 0) & (asked > newest - last)

    def _end_pass(self, query: Tensor, received: Tensor | None, visibility: Visibility) -> None:
        if received is not None:
            self.keep.policy.observe(View(self, self.keep), received.detach())
        elif self._votes_later:
            self.keep.last.note(query.detach(), self.table.positions[:, 0, -query.shape[2] :])
        self._visibility = visibility
        if not self.prefilling:
            self._evict()

    def end_prefill(self) -> None:
        """The prompt has ended, after any number of passes: what was held back happens now."""
        if self.in_prompt and self.lengths:
            self._busy = True
            self.place.end_prefill(self)
            self._evict()
            self._busy = False

    def _evict(self) -> None:
        """After the prompt and every later pass: let go what no query will see, and let the keep decide."""
        keep, view, self.in_prompt = self.keep.policy, View(self, self.keep), False
        evicts = keep.evicts and not self.keep.on_top
        if evicts:
            self.place.commit(self)
            if self.keep.last.query is not None:
                keep.observe(view, self._votes())
            elif not keep.watches:
                keep.observe(view, None)
        gone = self.local is not None and self.table.in_view(self._visibility)
        if gone:
            self._let_go(*gone)
        self._visibility = self.sinks = None
        slots = keep.choose(view) if evicts else None
        if slots is not None:
            self._let_go(slots, self.keep.limits)

    def _let_go(self, slots: Tensor, limits: list[int]) -> None:
        """Everything but `slots` `[batch, kv_heads, n]` (-1: nothing) goes, at most `limits` per row stay."""
        self.place.flush(self)
        self.table.keep(slots, limits)
        for part in (self.keep, self.store, self.place):
            part.keep_slots(slots)

    @property
    def _votes_later(self) -> bool:
        """Whether the last queries of a prompt in several passes are held, to vote when it has ended."""
        held = self.prefilling or self.keep.last.query is not None
        return self.watches and self.keep.policy.last_queries is not None and self.in_prompt and held

    def _votes(self) -> Tensor:
        """What every token received from the prompt's last queries, `[batch, kv_heads, slots]`: summed where
        the keys are."""
        last, self.keep.last = self.keep.last, LastQueries(self.keep.policy)
        where = torch.device("cpu") if self.place.on_host else last.query.device
        query, asked, offered = (x.to(where) for x in (last.query, last.positions, self.table.positions))
        keys, _ = self.store.read(where)
        allowed = self._visibility.allowed(asked, offered)
        sinks = None if self.sinks is None else self.sinks.to(where)
        _, received = attend(
            query, keys, None, self.scaling, allowed, asked >= 0, softcap=self.softcap, sinks=sinks
        )
        return received.to(last.query.device)

    # Its neighbours.

    def follow(self, following: Layer) -> None:
        self._following = weakref.ref(following)

    @property
    def following(self) -> Layer | None:
        """The layer that attends next; after the last one the first, for the next step."""
        return self._following()

    def _check_whole(self) -> None:
        """A pass that broke off (Ctrl-C, a dead link) leaves layers that hold different tokens."""
        layer = self if self.order == 0 else None
        while layer is not None:
            if layer._busy or layer.seen != self.seen:
                raise RuntimeError(
                    "the last pass through this cache broke off: start again with cache.reset()"
                )
            layer = layer.following if layer.following.order else None

    def check_model(self, attention) -> None:
        """ValueError where `attention`, the module that attends, is none of the model's."""
        if self._attention is None or self._attention() is not attention:
            if self.model is None or all(module is not attention for module in self.model.modules()):
                self._pending = None
                raise ValueError(other_model(self.model))
            self._attention = weakref.ref(attention)

    # What policies, and people, look at.

    @property
    def model(self):
        """The model that the cache was made for."""
        return self._model()

    @property
    def evicts(self) -> bool:
        """Whether the keep ever drops a token."""
        return self._policies[0].evicts

    @property
    def watches(self) -> bool:
        """Whether the keep wants to know the attention that every token receives in this pass."""
        keep = self.keep.policy
        done = self.keep.on_top or (keep.once and self.keep.limits is not None)
        return keep.watches and keep.evicts and not done

    seen = _of_table("seen", "Tokens fed so far, padding included.")
    lengths = _of_table("lengths", "Real tokens seen, per row.")
    rows_held = _of_table("rows_held", "Real tokens held, per row and head.")
    slots = _of_table("count", "Slots in use, those on their way to the host included.")
    slot_positions = _of_table("positions", "`[batch, kv_heads, slots]`: original positions, -1 for none.")

    @property
    def positions(self) -> Tensor:
        """`slot_positions` as a LongTensor."""
        return self.table.positions.long()

    def timed(self, what: str):
        """A context whose time goes to the timeline, where one is recorded."""
        return nullcontext() if self.timeline is None else self.timeline.span(what, self.index)

    def tensors(self) -> Iterator[tuple[bool, Tensor]]:
        """(is on the host, tensor) for everything this layer holds."""
        self.place.commit(self)
        for state in (self.keep, self.store, self.place):
            for tensor in state.tensors():
                yield state is self.store and self.place.on_host, tensor
        if self.table.moved is not None:
            yield False, self.table.moved
