"""Contents: what one layer of a cache holds, and its interface to transformers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from .attention import Recorded
from .devices import entry_of
from .foreign import NoTensor
from .models import ModelShape, check_outside
from .models.shape import other_model
from .ranks import check_splits, rank_of, ranks_of
from .slots import Slots
from .turns import end
from .visibility import Visibility


def _of(part: str, name: str, what: str) -> property:
    """A property read from a part of the layer."""
    return property(lambda layer: getattr(getattr(layer, part), name), doc=what)


class Contents(NoTensor, CacheLayerMixin):
    """The tokens of one layer: the states of a keep, a store and a place, and the table of its slots.

    index: of the layer in the model. order: its index among those that attend. local: its sliding window or
    chunk, None if it attends to everything; tokens that no later query sees are dropped. policies: keep,
    store, place; `keep`, `store` and `place` are their states. table: `Slots`. given: the running pass, or
    the rest of the last one (`attention.Recorded`). cache: a weak reference to the KVCache, which sets it.
    unordered: a function that puts slots in order after faster steps; None: they are in order. timeline: a
    `measure.timeline.Timeline` while recording. on_read: called as on_read(layer, held, slots, query) before
    a step attends, to all of `held` if slots is None.
    """

    is_sliding = False

    def __init__(self, index: int, order: int, policies, shape: ModelShape, model, local: int | None = None):
        self.index, self.order, self.local = index, order, local
        self.shape, self.kv_heads = shape, shape.kv_heads
        self.prefilling = False  # True inside `cache.prefill()`: the keep waits
        self.timeline = self.on_read = self.place = self.cache = None
        self.open = False  # True as long as pieces of a bare prompt may follow: see `turns.py`
        self.rereading = None  # while the prompt is read again: a tuple, the last argument of `Keep.hear`
        self._policies, self._model = policies, weakref.ref(model)
        self.ranks, self.rank = ranks_of(model), rank_of(model)
        if self.ranks > 1:
            check_splits(policies[1].of(order, shape.layers))
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.dtype: torch.dtype | None = None  # of the first pass
        self.autocast = False  # whether it ran under autocast
        self.restart()

    def restart(self) -> None:
        """Forget the keys and values."""
        if self.place is not None:
            self.place.drop()
        self.table, self.unordered = Slots(self.kv_heads), None
        self.keep, self.store, self.place = (policy.start(self) for policy in self._policies)
        self.given = Recorded(None, None, None, None, 1.0)
        self._pending: tuple[Tensor, Tensor] | None = None  # K and V that wait for the attention function
        self.fetched: Tensor | None = None  # while a step evicts: the slots it attended to, None for all
        self.moved_bytes, self.in_prompt = 0, True  # until the prompt has ended
        self.scored: float | None = None  # of the prompt's kept tokens, the share chosen by score
        self.later: list[int] = []  # where the last later turn began, tokens of each row
        self.raw, self.waits = None, False  # inputs of the pieces, and whether they still have to be written
        self.is_initialized = self._busy = False

    def __deepcopy__(self, memo) -> Contents:
        """A separate layer with the same tokens, not recorded, outside any pass or `prefill` block."""
        memo[id(self)] = twin = object.__new__(type(self))
        own = {"timeline": None, "on_read": None, "prefilling": False, "rereading": None, "_pending": None}
        own["given"] = replace(self.given, query=None, keys=None, values=None)
        vars(twin).update(copy.deepcopy({**vars(self), **own}, memo))
        return twin

    def try_step(self) -> None:
        """Try steps in a fork to raise any error that a later step would, except for one-line refusals."""
        if hasattr(self.store, "pool"):  # which copies share
            return
        heads = self.shape.heads * self.kv_heads // self.shape.kv_heads
        how = {"dtype": self.dtype, "device": entry_of(self.model)}
        rows = [*range(len(self.lengths)), 0]
        query = torch.zeros(len(rows), heads, 1, self.shape.head_dim, **how)
        values = torch.zeros(len(rows), self.kv_heads, 1, self.shape.value_dim, **how)
        twin = copy.deepcopy(self)
        twin.reorder_cache(torch.tensor(rows, device="cpu"))
        twin.check_kinds(query[:, : self.kv_heads], values)
        with suppress(ValueError):
            for _ in range(2 + min(128, getattr(self.store, "group", 0))):  # KIVI writes a block
                twin.place.speculate(twin, lambda **norm: query)
                twin.update(query[:, : self.kv_heads], values)
                twin.attend(query, Visibility(local=self.local), self.given.scaling, self.given.softcap)

    def check_kinds(self, keys: Tensor, values: Tensor) -> None:
        """ValueError if the codes held are of another kind than those of the new K and V."""
        if not hasattr(self.store, "encode"):
            return
        coded = copy.deepcopy(self.store).encode(keys, values)
        for part in (self.store, getattr(self.store, "left", self.store)):
            held, expected = (*part.keys, *part.values) if part.keys else (), (*coded[0], *coded[1])
            if held and len(held) != len(expected):
                raise ValueError(f"it holds {len(held)} tensors in the place of {len(expected)}")
            for x, fresh in zip(held, expected, strict=False):
                if x.dtype != fresh.dtype and not (x.is_floating_point() and fresh.is_floating_point()):
                    raise ValueError(f"it holds {x.dtype} in the place of {fresh.dtype}")

    # What transformers calls.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Take the new K and V `[batch, kv_heads, tokens, head_dim]`; returns the layer, twice."""
        for name, x in (("keys", key_states), ("values", value_states)):
            if not isinstance(x, Tensor) or x.dim() != 4:
                shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(
                    f"{name}: expected a tensor [batch, kv_heads, tokens, head_dim], not {shape}"
                )
        self.is_initialized = True
        self.in_order()
        self._pending = key_states.detach(), value_states.detach()
        return self, self

    def in_order(self) -> None:
        """Put the slots in the order of positions again."""
        if self.unordered is not None:
            self.unordered()

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.seen if self.waits else self.slots
        return held + query_length, self.seen - held

    def get_max_length(self) -> int:
        return self.store.max_length

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back at any moment."""
        return not (self.evicts or self.local is not None or self.store.in_blocks or self._knows_more)

    @property
    def _knows_more(self) -> bool:
        """Whether a fetch knows keys by what they were before the store rounded them."""
        fetch = getattr(self.place, "fetch", None)
        return getattr(fetch, "bounds_keys", False) and not self.store.policy.as_they_are

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of the old row `beam_idx[i]`; any number of rows (a fork) is allowed."""
        if self.lengths:
            self.place.flush(self)
            for part in (self.keep, self.store, self.place, self.table):
                part.select_rows(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. ValueError where an eviction cannot be undone."""
        if tokens_to_remove == 0 or not self.lengths:
            return
        left = max(0, self.seen + tokens_to_remove)
        self.check_crop(left)
        if left == 0:
            self.reset()
            return
        self.place.flush(self)
        slots = self._slots_left(left)
        for part in (self.store, self.place):
            part.crop(slots)
        self.table.crop(slots, left)

    def _slots_left(self, left: int) -> int:
        """Slots after a crop to `left` tokens: fewer, where padding has left with a window."""
        return max(0, self.slots - (self.seen - left))

    def check_crop(self, left: int) -> None:
        """ValueError where what was held at `left` tokens cannot be had again."""
        name, held = type(self.keep.policy).__name__, int((self.slot_positions >= 0).sum())
        if self.evicts and held >= self.kv_heads * sum(min(n, self.local or n) for n in self.lengths):
            raise ValueError(
                f"crop: {name} has evicted nothing yet, but what it has learned of the last tokens cannot be "
                "taken back; start again with cache.reset()"
            )
        if self.evicts:
            gone = f"{name} has evicted tokens"
        elif left and not (self.rows_held == self.lengths and self.table.aligned):
            gone = "the window has left tokens behind"
        elif left and self._knows_more:
            raise ValueError(
                "crop: Quest has bounds of keys that the store has rounded since, so those of a shorter text "
                "cannot be had again; start again with cache.reset()"
            )
        else:
            return self.store.check_crop(self._slots_left(left)) if left else None
        raise ValueError(f"crop: {gone} that were held at that point; start again with cache.reset()")

    # For policies and people to read.

    @property
    def model(self):
        """The model that the cache was made for."""
        return self._model()

    @property
    def next_layer(self) -> Contents:
        """The layer that attends next; after the last one the first, for the next step."""
        layers = self.cache().attending
        return layers[(self.order + 1) % len(layers)]

    @property
    def evicts(self) -> bool:
        """Whether the keep ever drops a token."""
        return self._policies[0].evicts

    @property
    def rereads(self) -> bool:
        """Whether the keep rereads this prompt after its end (`reread.py`)."""
        keep = self._policies[0]
        return self.in_prompt and keep.rereads and keep.evicts

    @property
    def held_back(self) -> bool:
        """Whether a pass of the prompt does not end it."""
        return self.prefilling or self.rereads

    @property
    def seen(self) -> int:
        """Tokens fed so far, padding included."""
        waiting = 0 if self.raw is None else self.raw.keys.shape[2]
        return waiting if self.waits else self.table.seen

    lengths = _of("table", "lengths", "Real tokens seen, per row.")
    rows_held = _of("table", "rows_held", "Real tokens held, per row and head.")
    slots = _of("table", "count", "Slots in use, those on their way to the host included.")
    slot_positions = _of("table", "positions", "`[batch, kv_heads, slots]`: original positions, -1 for none.")

    scaling = _of("given", "scaling", "Of the pass that runs, or of the last one.")
    softcap = _of("given", "softcap", "As `scaling`.")
    sinks = _of("given", "sinks", "Of the pass that runs, see `kvlab_attention`.")

    @property
    def keys(self) -> Tensor | None:
        """K as numbers, `[batch, kv_heads, slots, head_dim]`, in the order of `slot_positions`: decoded, or
        copied from the host, at every access. Writing to it has no effect."""
        return self._numbers(0)

    @property
    def values(self) -> Tensor | None:
        """V, as `keys`."""
        return self._numbers(1)

    def _numbers(self, side: int) -> Tensor | None:
        if not self.seen:
            return None
        if (cache := self.cache()) is None:
            raise RuntimeError("the cache of this layer is gone: keep the cache itself, not only a layer")
        if self.waits:
            check_outside(cache)
            end(cache)
        if self.model is None:
            raise ValueError(other_model(None))
        with cache.thread.alone():
            self.place.commit(self)
            found = self.store.read(entry_of(self.model))[side].clone()
        if not found.shape[3]:
            raise AttributeError(f"{type(self.place.policy).__name__} holds keys in parts of its own")
        return found

    @property
    def positions(self) -> Tensor:
        """`slot_positions` as a LongTensor."""
        return self.table.positions.long()

    @property
    def mean_held(self) -> list[float]:
        """Real tokens held by each row, mean over the KV heads."""
        if self.table.moved is None:
            return self.rows_held
        return (self.table.positions >= 0).sum(-1).double().mean(-1).tolist()

    def timed(self, what: str):
        """A context whose time goes to the timeline, if one is recorded."""
        return nullcontext() if self.timeline is None else self.timeline.span(what, self.index)

    def tensors(self) -> Iterator[tuple[bool, Tensor]]:
        """(is on the host, tensor) for everything this layer holds."""
        self.place.commit(self)
        for state in (self.keep, self.store, self.place):
            for tensor in state.tensors():
                yield state is self.store and self.place.on_host, tensor
        if self.table.moved is not None:
            yield False, self.table.moved


class StandIn(CacheLayerMixin):
    """A layer of a cache that only passes itself to kvlab's attention function, with the new K and V in
    `new`: it holds no tokens, and `seen` are counted elsewhere."""

    is_sliding = is_compileable = False
    seen = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        self.new = key_states, value_states
        return self, self

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1
