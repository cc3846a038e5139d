"""One prefill for many caches.

A prompt attends to its own K and V as they are, whatever a cache does with them afterwards: the
forward pass over a prompt is the same for every method, and it is most of the cost of a score. So it
is made once, each layer's query, K and V are recorded, and every cache takes them as if the pass had been
its own. A test holds a filled cache against one that was prefilled: same positions, bytes and logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvlab.attention import Recorded, recording
from kvlab.decode import Stepper
from kvlab.modes import keeping
from kvlab.recompute import NoCache
from kvlab.visibility import Visibility

from .batching import TOKENS
from .clock import Clock


class Prompt:
    """A prefill that was made without a cache: `layers` holds what every layer's attention was given, `ids`
    and `mask` what was fed."""

    @keeping()
    def __init__(self, model, ids: Tensor, mask: Tensor | None, last: bool):
        """A few rows at a time: activations then stay in the processor's cache."""
        parts, logits = [], []
        for rows in torch.arange(len(ids)).split(max(1, TOKENS // ids.shape[1])):
            real = None if mask is None else mask[rows]
            with recording() as layers:
                logits.append(Stepper(model, NoCache(model)).feed(ids[rows], attention_mask=real, last=last))
            parts.append(layers)
        self.logits = logits[0] if len(logits) == 1 else torch.cat(logits)
        self.ids, self.mask = ids, mask
        self.layers = [joined(layer, mask) for layer in zip(*parts, strict=True)]
        self._received: dict[tuple, Tensor] = {}

    def received(self, index: int, last: int | None) -> Tensor:
        """Attention that every token of a layer received from the `last` queries (None: all),
        `[batch, kv_heads, tokens]`, for keeps that score by it; computed once."""
        if (index, last) not in self._received:
            self._received[index, last] = self.layers[index].received(last)
        return self._received[index, last]

    @keeping()
    def fill(self, cache, clock: Clock) -> None:
        """Give a fresh cache the prefill; a copy of the attention received, since keeps add to it."""
        for index, (layer, given) in enumerate(zip(cache.layers, self.layers, strict=True)):
            received = None
            if layer.observes:
                with clock.of(None):  # computed once, for all that ask
                    received = self.received(index, layer.last_queries)
                received = received.clone()
            layer.fill(given, received)
        cache.filled(self.ids, self.mask)


def joined(parts: tuple[Recorded, ...], mask: Tensor | None) -> Recorded:
    """One layer's record of all rows, from those of some rows each; mask `[batch, tokens]` of all."""
    if len(parts) == 1:
        return parts[0]
    names = ("query", "keys", "values")
    rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    seen = visible([(len(part.query), part.visibility) for part in parts], mask)
    return replace(parts[0], visibility=seen, **rows)


def visible(parts: list[tuple[int, Visibility]], padding: Tensor | None) -> Visibility:
    """What all rows may see, from what so many rows each may; padding `[batch, tokens]`: of all rows."""

    def rule(rows, head, queries, keys):
        found, start = [], 0
        for count, part in parts:
            mine = slice(start, start + count)
            found.append(part.rule(rows[:count], head, queries[mine], keys[mine]))
            start += count
        return torch.cat(found)

    first = parts[0][1]
    return Visibility(padding, None if first.rule is None else rule, first.local, first.known)


@torch.inference_mode()
def shared(
    model, caches: dict, ids: Tensor, mask: Tensor | None, last: bool, clock: Clock | None = None
) -> Iterator[tuple]:
    """Prefill every cache with one prompt batch: yields (name, Stepper, logits), one after the other.

    ids, mask `[batch, tokens]`; logits as `Stepper.feed` returns them (the same tensor for all but
    `recompute`, which makes its own pass), or the exception that a method raised. A cache is let go
    when the next one is asked for. Until then it is its time on the clock.
    """
    prompt, clock = None, clock or Clock()
    for name, cache in caches.items():
        before = clock.turn(name)
        try:
            cache.reset()
            stepper = Stepper(model, cache)
            if cache.recompute or len(caches) == 1 or not getattr(cache, "fillable", True):
                found = stepper.feed(ids, attention_mask=mask, last=last)
            else:
                with clock.of(None):
                    prompt = prompt or Prompt(model, ids, mask, last)
                prompt.fill(cache, clock)
                stepper.ids, stepper.padded = ids, mask is not None
                stepper.mask = torch.ones_like(ids) if mask is None else mask
                found = prompt.logits
        except Exception as error:
            found = error
        try:
            yield name, stepper, found
        finally:
            clock.turn(before)
        cache.reset()
