"""Latent: a layer that caches the latents of K and V (multi-head latent attention, DeepSeek-V2, 2024)."""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch
from torch import Tensor

from .attention import Recorded
from .interface import expanding, latest
from .layer import Layer
from .models import ModelShape
from .modes import keeping
from .telling import blaming
from .turns import join, keep_raw, of_piece


def shape_of_latents(model, shape: ModelShape, keep, place) -> ModelShape:
    """The shape of such a model's cached numbers. ValueError for a keep or a place that needs keys."""
    if place.on_host:
        raise ValueError("K and V are made of a latent after the cache: a host has nothing to fetch by")
    if keep.merge:
        raise ValueError("latents are cached: there are no keys to merge")
    rank, width = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    return replace(shape, kv_heads=1, head_dim=rank, value_dim=width)


class LatentLayer(Layer):
    """The store holds the latent as K and the rotary part as V, in one head, each with its own width. The
    model computes K and V of all heads from them after `update`, which therefore returns numbers; the
    attention function passes the result back to this layer.

    The keep sees one head: attention received is the mean over all query heads.
    """

    _attention = None  # weak reference to the module that attended last
    _expanded = None  # K of all heads, of all tokens, while a pass attends

    def _numbers(self, side: int) -> None:
        raise AttributeError(
            "this layer caches latents: the model makes keys and values of them in every pass"
        )

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        """Take the new latents `[batch, 1, tokens, rank]` and rotary parts `[batch, 1, tokens, width]`;
        returns those that the pass attends to: the exact prompt, later all tokens held."""
        self.is_initialized, own = True, key_states.dtype
        self._pending = latents = self.in_its_dtype(key_states.detach(), value_states.detach())
        if self.waits and self.raw is not None:
            pairs = zip((self.raw.keys, self.raw.values), latents, strict=True)
            latents = tuple(torch.cat(pair, 2) for pair in pairs)
        elif self.seen > 0:
            new = key_states.shape[2]
            first = self.store.ends(new)[0] if self.store.in_blocks else new
            if first < new:
                raise ValueError(
                    f"layer {self.index}: these {new} tokens complete a block, which is rounded, and the "
                    f"model makes K and V of all latents at once: feed {first} of them first"
                )
            with (
                keeping(),
                torch.autocast(key_states.device.type, enabled=False),
            ):  # no business of what is stored
                self.append(Recorded(key_states, *latents, latest.get(), self.scaling))
                latents = self.store.read(key_states.device)
        expanding(self)
        return tuple(x.to(own) for x in latents)

    def serves(self, attention) -> bool:
        """Whether `attention`, the module that attends, is one of the model's."""
        if self._attention is None or self._attention() is not attention:
            if self.model is None or all(module is not attention for module in self.model.modules()):
                return False
            self._attention = weakref.ref(attention)
        return True

    def try_step(self) -> None:
        """Nothing to try: a step's K and V come from the model."""

    @blaming
    def _attend(self, given: Recorded) -> Tensor:
        latents, self._pending = self._pending, None
        observes, self._expanded = self.observes and not self.votes_later, given.keys
        if self.waits:
            join(self, replace(given, keys=latents[0], values=latents[1]))
            return of_piece(given, given.keys, given.values)
        if self.seen == 0:
            out, received = given.attend(observes, self.last_queries)
            given = replace(given, keys=latents[0], values=latents[1])
            self.fill(given, _mean(received))
            keep_raw(self, given)
            return out
        self.given = given
        allowed, asked = self.table.visible(given.query.shape[2], None, given.visibility)
        counted = self.counted(asked) if observes else None
        out, received = given.attend_to(given.keys, given.values, allowed, counted)
        self.end_pass(_mean(received))
        return out

    def fill_pieces(self, given: Recorded) -> None:
        received = None
        if self.observes:
            received = replace(given, keys=self._expanded).received(self.last_queries)
        self.fill(given, _mean(received))

    def note_queries(self) -> None:
        """They vote at once, on the tokens so far: only now are there K of all heads. The votes of the
        prompt's last pass count."""
        super().note_queries()
        votes = self.keep.last.votes(self._expanded, self.slot_positions, self.given)
        self.keep.last.received = _mean(votes)

    def late_votes(self) -> Tensor:
        return self.keep.last.received

    def ended(self) -> None:
        super().ended()
        self._expanded = None


def _mean(received: Tensor | None) -> Tensor | None:
    return None if received is None else torch.mean(received, 1, keepdim=True)
