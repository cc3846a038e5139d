"""KVCache: three policies (Keep, Store, Place) form a cache for transformers models."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .bound import Bound
from .devices import check_loaded
from .foreign import FOREIGN
from .hybrid import check_no_gaps, forget, keep_states, moved_by_gaps, refuse_crop, states_of
from .keep import Keep, KeepAll
from .layer import Layer
from .layers import make_layers
from .merging import check_merges
from .models import Switch, bodies_of, check_outside, fed_to, inside, prepare, refusal, rotations_of
from .models.shape import forgetful, other_model, taken_out
from .models.shrunk import forgets
from .modes import keeping
from .one_thread import OneThread
from .parameters import check_batch, check_kind, check_rows
from .place import Device
from .reread import check_fed, check_rereads, note, reread
from .stats import Stats, stats_of
from .store import buffer_of
from .turns import begin, cannot_go_back, check_begun, end, fed_lengths, forget_turns, given_to, half_done
from .visibility import own_positions


class KVCache(Bound):
    """A key/value cache made of a Keep, a Store and a Place.

    model: the model it serves; passes with this cache attend through kvlab. keep: which tokens stay (default:
    all). store: a buffer (`Growing()`, `Static()`) or a format (`Int(bits=4)`, meaning
    `Growing(Int(bits=4))`, or `Ragged(...)` for a keep that is `ragged`). place: `Device()` or `Host(fetch)`.

    Pass it as `past_key_values` to `model.generate` or `model(...)`, or use `kvlab.decode`. The prompt
    attends to its own exact K and V; the effect of the store and the keep begins with the next token. A batch
    may be padded on either side, with an `attention_mask`.
    Raises ValueError when parameters do not fit the model.
    """

    _began: int | None = None  # tokens held when the running, or broken, pass began
    _marks: list[str] | None = None  # what the model's configuration said of its weights
    _called = _reached = 0  # indices in `_bodies`: where that pass began, and how far it is
    open = False  # whether a bare prompt or turn has not ended (see `turns.py`) ...
    pieces, fed_pieces = 0, []  # ... its passes so far, and what they were fed, where the keep rereads
    cut_from = None  # ... and the positions of the last one, unless it was a single new token
    takes_back = False  # whether tokens may be removed after every pass (`activate_past_recording`)

    def __init__(self, model, *, keep: Keep | None = None, store=None, place: Device | None = None):
        prepare(model)
        keep, place = KeepAll() if keep is None else keep, Device() if place is None else place
        check_kind("keep", keep, Keep, "a keep such as kvlab.keep.H2O()")
        check_kind("place", place, Device, "kvlab.place.Device() or Host(...)")
        store = buffer_of(store, keep)
        store.suits(keep, place)
        place.suits(keep, store)
        if why := refusal(model):
            raise ValueError(f"{type(model).__name__}: {why}")
        if keep.renumber and keep.evicts:
            rotations_of(model)  # refuses a model without them
        if keep.merge and keep.evicts:
            check_merges(store, place)
        super().__init__(layers=make_layers(model, keep, store, place))
        self.switch, self.thread = Switch(model), OneThread()
        self._bodies = {id(body): place for place, body in enumerate(bodies_of(model))}
        self.bind()
        if any(getattr(layer.keep, "policy", None) is not keep for layer in self.attending):
            raise ValueError(f"{type(keep).__name__}.start: expected the keep's own state, Keep.start(layer)")
        if keep.rereads and keep.evicts:
            check_rereads(keep, self, place)

    def bind(self) -> None:
        """Give the layers that hold K and V (the others are transformers' own) a reference to their cache: at
        the start, and when one in `layers` was exchanged."""
        self.attending: list[Layer] = [layer for layer in self.layers if isinstance(layer, Layer)]
        for layer in self.attending:
            layer.cache = weakref.ref(self)
        self.gapless = moved_by_gaps(self.layers) is not None

    @property
    def model(self):
        """The model it was made for."""
        return self.attending[0].model

    @property
    def lengths(self) -> list[int]:
        """Real tokens seen, per row."""
        first = self.attending[0]
        return fed_lengths(first) if first.waits else first.lengths

    @property
    def renumbers(self) -> bool:
        """Whether distances count only the tokens held, however long the text (see `Keep.renumber`)."""
        keep = self.attending[0].keep.policy
        return keep.renumber and keep.evicts and not keep.prompt_only

    @property
    def fillable(self) -> bool:
        """Whether the layers remember nothing of a prompt but its K and V (see `Layer.fill`)."""
        return all(type(layer) is Layer for layer in self.layers)

    def begin_pass(self, body, args=(), kwargs=None) -> None:
        """A pass through `body` begins, or reaches it as a part of the body that was called. ValueError if it
        is no part of the cache's model, RuntimeError for a broken cache."""
        at = self._bodies.get(id(body))
        if self.model is None or at is None:
            raise ValueError(other_model(self.model))
        if self.model.device.type == "meta":
            check_loaded(self.model)
        self.thread.enter()
        if self._began is None or at <= self._reached:
            again = self.attending[0].rereading is not None
            given = given_to(body, args, kwargs)
            if not again:
                self.check_whole()
                check_batch(len(given[0]), len(self.lengths))
            if self.switch.tokens is not None:
                self.switch.check(self, *given)
            if not again:
                if self.stepped:
                    end(self)  # a caller that says where a prompt ends has ended a bare one
                elif self.open or not self.prefilling:
                    begin(self, body, args, kwargs)
            if self.rereads:
                check_fed(self, body, args, kwargs)
            if self.gapless:
                keep_states(self.layers)
                mask = fed_to(body, args, kwargs)[1]
                check_no_gaps(self.layers, mask, self.get_seq_length(), self.lengths)
            self._check_marks(body.config)
            self._began = -1 if again else self.get_seq_length()
            self._called, self.fed = at, True
        self._reached = at

    def _check_marks(self, config) -> None:
        """RuntimeError if kvlab has changed the model's weights, and said so in its configuration, since the
        cache was filled: `place.fold`, `store.fold_smoothing`."""
        marks = [name for name in vars(config) if name.startswith("kvlab_")]
        if self.get_seq_length() and self._marks not in (None, marks):
            raise RuntimeError(
                "the model was folded after this cache was filled: start again with cache.reset()"
            )
        self._marks = marks

    def end_pass(self, body, args=(), kwargs=None) -> None:
        """The pass has ended."""
        if self._bodies[id(body)] == self._called and self.attending[0].rereading is None:
            seen = [layer.seen for layer in self.attending] if self._began == 0 else ()
            if len(set(seen)) > 1:  # left like a pass that broke off
                raise ValueError(taken_out(seen))
            self._began = None
            if self.rereads:
                fed = fed_to(body, args, kwargs)
                if self.open:
                    self.fed_pieces.append(fed)
                if not self.attending[0].waits:
                    self._passed(*fed)
            self.leave()

    def __bool__(self) -> bool:
        """Phi-3's `generate` tests this for a cache that it drops at the switch, to continue without it."""
        return self.switch.tokens is None

    def filled(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """Called when every layer has taken a whole prompt by `Layer.fill`, with its ids and padding mask,
        `[batch, tokens]`."""
        self.switch.check_lengths(self.lengths)
        if self.rereads:
            self._passed(ids, mask, own_positions(torch.ones_like(ids) if mask is None else mask))

    def _passed(self, *fed: Tensor | None) -> None:
        """A pass of a prompt that will be read again."""
        note(self, *fed)
        if not self.prefilling:
            self._end_prompt()

    def _end_prompt(self) -> None:
        """The prompt has ended: do what was held back."""
        check_begun(self)
        with self._changing():
            if self.rereads and self.attending[0].lengths:
                reread(self)
            for layer in self.attending:
                layer.end_prefill()

    @property
    def rereads(self) -> bool:
        """Whether this is a pass of a prompt that the keep rereads after its end."""
        first = self.attending[0]
        return first.rereads and first.rereading is None

    @property
    def broken(self) -> bool:
        """Whether something broke off (Ctrl-C, a dead link) after it had changed the contents. transformers'
        own states do not show whether they changed."""
        if any(layer.place.lost for layer in self.attending):
            return True
        if self._began is None:
            return False
        if any(layer._busy or layer.seen != self._began for layer in self.attending):
            return True
        return any(True for layer in self.layers for _ in states_of(layer))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Tokens are dropped or moved outside a pass: an interruption here also leaves a broken cache."""
        with self.thread.alone():
            self._in_order()
            with half_done(self):
                yield

    def _in_order(self) -> None:
        with half_done(self):
            for layer in self.attending:
                layer.in_order()

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """No pass of this cache runs, an open prompt has ended, and slots are in order."""
        check_outside(self)
        with self.thread.alone():
            end(self)
            self._in_order()
            yield

    def leave(self) -> None:
        """A pass of this thread is over, or broke off: other threads may enter."""
        self.thread.leave()

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if torch.compiler.is_dynamo_compiling():
            raise ValueError(FOREIGN)
        if self._began is None:  # transformers asks within a pass, but this one was never announced
            raise ValueError(
                f"{other_model(self.model)}; a part of the right one is called as part(...), since "
                "part.forward(...) tells the cache nothing"
            )
        if query_length > 1 and self._began and not self.continues:
            self._began = None  # nothing has been written yet
            raise ValueError(forgetful(self.model))
        return super().get_mask_sizes(query_length, layer_idx)

    @property
    def continues(self) -> bool:
        """Whether a text may continue with a pass of several tokens."""
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in self.layers)
        return not states or not forgets(self.model)

    def reset(self) -> None:
        """Forget everything."""
        check_outside(self)
        with self.thread.alone():
            self._began = -1  # broken until all of it is done
            forget_turns(self)
            for layer in self.layers:
                layer.reset() if isinstance(layer, Layer) else forget(layer)
            self._began, self.fed, self.switch.beyond = None, False, None
        self.leave()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens. ValueError where a layer cannot, before any has;
        RuntimeError for a broken cache."""
        check_outside(self)
        check_kind("tokens_to_remove", tokens_to_remove, int, "a whole number")
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): expected a negative number of tokens to remove")
        with self.thread.alone():
            self.check_whole()
            end(self)
            if not tokens_to_remove:
                return
            for layer in self.layers:
                if isinstance(layer, Layer):
                    layer.check_crop(max(0, layer.seen + tokens_to_remove))
                else:
                    refuse_crop(layer)
            with self._changing():
                for layer in self.attending:
                    layer.crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """transformers announces before the first token that it will remove tokens (assisted decoding).
        ValueError if evictions cannot be undone, and for a cache that holds tokens: transformers would feed
        those again."""
        if held := self.get_seq_length():
            raise ValueError(
                f"assisted decoding takes the whole text for new, and this cache holds {held} tokens of it: "
                "decode without an assistant, or start again with cache.reset()"
            )
        for layer in self.layers:
            if why := cannot_go_back(layer):
                raise ValueError(
                    f"assisted decoding takes tokens back, and {why}: decode without an assistant"
                )
        self.takes_back = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of the old row `beam_idx[i]`; any number of rows (a fork) is allowed."""
        check_outside(self)
        check_rows("beam_idx", beam_idx, len(self.lengths))
        end(self)
        with self._changing():
            super().reorder_cache(beam_idx)

    def __deepcopy__(self, memo) -> KVCache:
        with self._ended():
            for layer in self.attending:
                layer.place.flush(layer)  # transfers under way belong to this cache
            memo |= {id(x): x.detach().clone() for layer in self.layers for x in states_of(layer)}
            memo[id(self)] = twin = object.__new__(type(self))
            vars(twin).update(copy.deepcopy(vars(self), memo))
        twin.bind()
        return twin

    @property
    def prefilling(self) -> bool:
        """Whether a `prefill` block is open."""
        return self.attending[0].prefilling

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """Inside this block the prompt may come in several passes; at its end the keep compresses the tokens
        as after one pass. Each pass attends to the earlier ones in their stored form.

        Without it `Stepper`'s first pass is the prompt, and a later one of many tokens continues the text;
        for bare passes, `turns.py` defines the prompt. Blocks may be nested: the outermost counts. After an
        exception, and in a copy, the prompt is still open: it ends with another block, or with the next pass.
        Raises ValueError if the prompt has already ended.
        """
        end(self)
        if self.prefilling:
            yield
            return
        if not all(layer.in_prompt for layer in self.attending):
            raise ValueError("prefill: the prompt in this cache has ended; start again with cache.reset()")
        for layer in self.attending:
            layer.prefilling = True
        try:
            yield
            check_begun(self)
            with half_done(self):
                for layer in self.attending:
                    layer.prefilling = False
                self._end_prompt()
        finally:
            for layer in self.attending:
                layer.prefilling = False

    def save(self, path) -> None:
        """See `Bound.save`."""
        with self._ended():
            super().save(path)

    def hold(self) -> None:
        """The context has ended: until `reset`, later tokens are held on top of the keep's budget, and held
        tokens stay, except those that leave a window."""
        with self._ended():
            for layer in self.attending:
                layer.keep.on_top = True

    def stats(self) -> Stats:
        """Bytes really allocated, bytes moved by the last pass, tokens seen and held."""
        with self.thread.alone():
            if not inside(self):
                end(self)
            return stats_of(self)

    @keeping()
    def speculate(self, layer: int, query) -> None:
        """A block passes its input on: `query()` is the query of layer `layer` for it."""
        found = self.layers[layer]
        if isinstance(found, Layer) and found.lengths and not found.in_prompt:
            found.place.speculate(found, query)
