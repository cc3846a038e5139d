"""Layer: one layer of a cache, in which a Keep, a Store and a Place work together at every pass."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .answer import gather_slots
from .attention import attend, own_positions, prefill, visible
from .kernels import attend_packed, fits
from .models import ModelShape
from .padding import Padding


class Layer(CacheLayerMixin):
    """One layer of a KVCache: append -> read -> attend -> observe -> evict.

    What answers may look at: `lengths` (real tokens seen, per row), `rows_held` (real tokens held, per row
    and head), `slots` (in use), `fetched` (slots that this step attended to), `slot_positions`, `some_empty`,
    `store`, `kv_heads`, `scaling`, `more` (of the prompt is to come), `following` (the layer that attends
    next).
    """

    is_sliding = False

    def __init__(self, index: int, answers, shape: ModelShape, padding: Padding, model):
        self.index, self.padding, self.kv_heads = index, padding, shape.kv_heads
        self.more = False  # True while more of the prompt is to come: nothing is evicted yet
        self.timeline = None  # a `measure.timeline.Timeline` while somebody records
        self.on_read = None  # called as on_read(layer, held, slots, query) with what a step attends to
        self._answers = copy.deepcopy(answers)
        for answer in self._answers:
            answer.bind(shape, index, model)
        self.reset()

    def follow(self, following: Layer) -> None:
        self._following = weakref.ref(following)

    def reset(self) -> None:
        """Forget everything."""
        if hasattr(self, "place"):
            self.place.drop()
        self.keep, self.store, self.place = copy.deepcopy(self._answers)
        self.seen = 0  # tokens fed so far, padding included
        self.lengths: list[int] = []  # real tokens seen, per row
        self.rows_held: list[int] = []  # real tokens held, per row
        self._positions: Tensor | None = None  # None: slot j holds token j in every row
        self._pending: tuple[Tensor, Tensor] | None = None
        self.fetched: Tensor | None = None  # while a step evicts: slots it attended to, None for all
        self._device: torch.device | None = None  # the model's
        self.scaling, self.moved_bytes = 1.0, 0
        self.is_initialized = self._busy = False
        self.padding.forget()

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
        held = self.slots
        return held + query_length, self.seen - held

    def get_max_length(self) -> int:
        return getattr(self.store, "max_length", -1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of the old row `beam_idx[i]`; any number of rows (a fork) is allowed."""
        if not self.lengths:
            return
        self.place.settle(self)
        for answer in (self.keep, self.store, self.place):
            answer.select_rows(beam_idx)
        if self._positions is not None:
            self._positions = self._positions.index_select(0, beam_idx.to(self._positions.device))
        rows = beam_idx.tolist()
        self.lengths = [self.lengths[row] for row in rows]
        self.rows_held = [self.rows_held[row] for row in rows]

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
        if self.keep.evicts:
            raise ValueError(
                f"crop: {type(self.keep).__name__} has evicted tokens that were held at that point; "
                "start again with cache.reset()"
            )
        left = max(0, self.seen + tokens_to_remove)
        if left == 0:
            self.reset()
            return
        self.place.settle(self)
        self.store.crop(left)
        self.seen = left
        self.place.crop(self.seen)
        if self._positions is None:
            self.lengths = [self.seen] * len(self.lengths)
        else:
            self._positions = self._positions[..., : self.seen]
            self.lengths = (self._positions[:, 0] >= 0).sum(-1).tolist()
        self.rows_held = list(self.lengths)

    # The path of one pass.

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float, window: int | None) -> Tensor:
        """Append what `update` took, attend, and let the keep decide. Shapes as in `attention.attend`."""
        (keys, values), self._pending = self._pending, None
        self._check_whole()
        if self.seen == 0:
            real, _ = self.padding.of(mask, query.shape[0], query.shape[2], 0)
            positions = None if real is None else own_positions(real)[:, None]
            watched = self.watches, self.keep.last_queries
            out, received = prefill(query, keys, values, positions, scaling, window, *watched)
            self.fill(query, keys, values, mask, scaling, received)
            return out
        self.scaling, self.moved_bytes, self._busy = scaling, 0, True
        self._append(keys, values, mask)
        self.place.append(self, keys)
        with self.marked("attention"):
            out, received = self._read_and_attend(query, scaling, window)
            self._observe_and_evict(received)
        self._busy, self.fetched = False, None
        return out

    def _read_and_attend(self, query: Tensor, scaling: float, window: int | None):
        """(Output `[batch, heads, tokens, head_dim]`, what held tokens received where a keep watches)."""
        held, slots = self.place.read(self, query, scaling)
        self.fetched = slots
        if self.on_read is not None:
            self.on_read(self, held, slots, query)
        allowed, asked = self._visibility(query.shape[2], slots, window)
        if not self.watches and fits(held, query):
            out, received = attend_packed(query, held, scaling, allowed), None
        else:
            watch = self._watched(query, asked) if self.watches else None
            out, received = attend(query, *held.read(query.device), scaling, allowed, watch)
        self.place.finish(self)
        if self.watches and slots is not None:
            received = self._to_all_slots(received, slots)
        return out, received

    def _check_whole(self) -> None:
        """A pass that broke off (Ctrl-C, a dead link) leaves layers that hold different tokens."""
        layer = self if self.index == 0 else None
        while layer is not None:
            if layer._busy or layer.seen != self.seen:
                raise RuntimeError(
                    "the last pass through this cache broke off: start again with cache.reset()"
                )
            layer = layer.following if layer.following.index else None

    def _watched(self, query: Tensor, asked: Tensor | None) -> Tensor:
        """Which of a step's queries the keep watches, `[batch, queries]`."""
        if asked is None:
            return torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
        last = self.keep.last_queries
        newest = asked.amax(-1, keepdim=True)
        return (asked >= 0) if last is None else (asked >= 0) & (asked > newest - last)

    @property
    def watches(self) -> bool:
        """Whether the keep wants to know the attention that every token received."""
        return self.keep.watches and self.keep.evicts

    def fill(self, query, keys, values, mask, scaling: float, received=None) -> None:
        """Take a whole prompt whose attention has been computed: store, place and evict.

        query `[batch, heads, tokens, head_dim]`, keys and values `[batch, kv_heads, tokens, head_dim]`,
        mask `[batch, tokens]` or None, received `[batch, kv_heads, tokens]` where the layer `watches`
        (over the keep's `last_queries`).
        Only for an empty layer.
        """
        self.is_initialized, self.scaling, self.moved_bytes = True, scaling, 0
        self._append(keys, values, mask)
        self.place.prefill(self, query, keys)
        self._observe_and_evict(received)

    def _observe_and_evict(self, received: Tensor | None) -> None:
        if self.watches:
            self.keep.observe(received)
        if self.keep.evicts and not self.more:
            self._evict()

    def _append(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        batch, _, tokens, _ = keys.shape
        self._device = keys.device
        if self.lengths and batch != len(self.lengths):
            raise ValueError(f"batch of {batch} rows, but the cache holds {len(self.lengths)}: use reset()")
        real, counts = self.padding.of(mask, batch, tokens, self.seen)
        try:
            self.place.write(self, keys, values, real)
        except ValueError as error:
            raise ValueError(f"layer {self.index}: {error}") from None
        before = self.lengths or [0] * batch
        if real is not None or self._positions is not None:
            self._append_positions(before, real, tokens, keys.device)
        self.lengths = [old + new for old, new in zip(before, counts, strict=True)]
        held = self.rows_held or [0] * batch
        self.rows_held = [old + new for old, new in zip(held, counts, strict=True)]
        self.seen += tokens

    def _append_positions(self, before: list[int], real: Tensor | None, tokens: int, device) -> None:
        if self._positions is None:  # until now, slot j held token j
            self._positions = torch.arange(self.seen, device=device, dtype=torch.int32)
            self._positions = self._positions.expand(len(before), 1, -1)
        start = torch.tensor(before, device=device, dtype=torch.int32).view(-1, 1)
        if real is None:
            new = start + torch.arange(tokens, device=device, dtype=torch.int32)
        else:
            new = (start + real.cumsum(-1, dtype=torch.int32) - 1).masked_fill(~real, -1)
        new = new.unsqueeze(1).expand(-1, self._positions.shape[1], -1)
        self._positions = torch.cat([self._positions, new], dim=2)

    def _visibility(self, queries: int, slots: Tensor | None, window: int | None):
        """(allowed, positions of the queries) for `attend`; None where everything is allowed or asked."""
        plain = self._positions is None and queries == 1 and window is None
        if plain and (slots is None or bool((slots >= 0).all())):
            return None, None
        positions = self.slot_positions if self._positions is None else self._positions
        asked = positions[:, 0, -queries:]
        if slots is not None:
            gathered = gather_slots(positions.expand(*slots.shape[:2], -1), slots)
            positions = gathered.masked_fill(slots < 0, -1)
        return visible(asked, positions, window), asked

    def _to_all_slots(self, received: Tensor, slots: Tensor) -> Tensor:
        full = received.new_zeros(*received.shape[:2], self.slots)
        return full.scatter_add_(2, slots.clamp(min=0), received.masked_fill(slots < 0, 0.0))

    def _evict(self) -> None:
        self.place.land(self)
        slots = self.keep.choose(self)
        if slots is None:
            return
        positions = self.slot_positions.to(torch.int32)
        self._positions = gather_slots(positions, slots).masked_fill(slots < 0, -1)
        for answer in (self.keep, self.store, self.place):
            answer.keep_slots(slots)
        self.rows_held = [min(*pair) for pair in zip(self.rows_held, self.keep.limits, strict=True)]

    # What answers, and people, look at.

    @property
    def slots(self) -> int:
        """Slots in use, those on their way to the host included."""
        return self.store.length + self.place.arriving

    @property
    def following(self) -> Layer | None:
        """The layer that attends next; after the last one the first, for the next step."""
        return self._following()

    def marked(self, what: str):
        """A context whose time goes to the timeline, where one is recorded."""
        return nullcontext() if self.timeline is None else self.timeline.span(what, self.index)

    @property
    def some_empty(self) -> Tensor | None:
        """Positions `[batch, 1 or kv_heads, slots]` (-1: nothing there), or None: slot j holds token j."""
        return self._positions

    @property
    def slot_positions(self) -> Tensor:
        """Original position of the token in every slot, `[batch, kv_heads, slots]`, -1 for none."""
        shape = (len(self.lengths), self.kv_heads, self.slots)
        if self._positions is not None:
            return self._positions.expand(shape)
        return torch.arange(self.slots, device=self._device, dtype=torch.int32).expand(shape)

    @property
    def positions(self) -> Tensor:
        """LongTensor `[batch, kv_heads, slots]`: original position of every held token among its row's own
        tokens, -1 for padding."""
        return self.slot_positions.long()

    def tensors(self) -> Iterator[tuple[bool, Tensor]]:
        """(is on the host, tensor) for everything this layer holds."""
        self.place.land(self)
        for answer in (self.keep, self.store, self.place):
            for tensor in answer.tensors():
                yield answer is self.store and self.place.on_host, tensor
        if self._positions is not None:
            yield False, self._positions
