"""One prefill for many caches.

A prompt attends to its own K and V as they are, whatever a cache does with them afterwards: the
forward pass over a prompt is the same for every method, and it is most of the cost of a score. So it
is made once, each layer's query, K and V are kept, and every cache takes them as if the pass had been
its own. A test holds a filled cache against one that was prefilled: same positions, bytes and logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from kvlab.attention import prefill
from kvlab.decode import Stepper
from kvlab.visibility import Visibility, own_positions

from .batching import TOKENS


class Recorder(Cache):
    """Stands where a kvlab cache stands during one prefill and keeps what passes by."""

    recompute = False

    def __init__(self, layers: int):
        super().__init__(layers=[Record() for _ in range(layers)])

    def join(self, parts: list[Recorder], mask: Tensor | None) -> None:
        """Become the record of all rows, from those of some rows each; mask `[batch, tokens]` of all."""
        for layer, *others in zip(self.layers, *(part.layers for part in parts), strict=True):
            for name in ("query", "key", "value"):
                setattr(layer, name, torch.cat([getattr(other, name) for other in others]))
            layer.scaling, layer.softcap, layer.sinks = (
                getattr(others[0], name) for name in ("scaling", "softcap", "sinks")
            )
            layer.visibility = Visibility.joined(
                [(len(other.query), other.visibility) for other in others], mask
            )


class Record(CacheLayerMixin):
    """One layer's query `[batch, heads, tokens, d]`, K and V `[batch, kv_heads, tokens, d]`."""

    def __init__(self):
        super().__init__()
        self.is_initialized = True
        self._received: dict[int | None, Tensor] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs):
        self.key, self.value = key_states.detach(), value_states.detach()
        return self, self

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_max_length(self) -> int:
        return -1

    def attend(self, query: Tensor, visibility, scaling: float, softcap=None, sinks=None) -> Tensor:
        """What kvlab's attention function asks of a cache layer."""
        self.query, self.visibility = query.detach(), visibility
        self.scaling, self.softcap, self.sinks = scaling, softcap, sinks
        return self._prefill(self.value)[0]

    def _prefill(self, values: Tensor | None, *watched):
        real, _ = self.visibility.real(len(self.query), self.query.shape[2], 0)
        positions = None if real is None else own_positions(real)[:, None]
        return prefill(
            self.query, self.key, values, positions, self.scaling, self.visibility, *watched,
            softcap=self.softcap, sinks=self.sinks,
        )  # fmt: skip

    def received(self, last: int | None) -> Tensor:
        """Attention every token received from the `last` queries (None: all), `[batch, kv_heads, tokens]`,
        for the keeps that watch. A copy: keeps add to it."""
        if last not in self._received:
            self._received[last] = self._prefill(None, True, last)[1]
        return self._received[last].clone()


def fill(cache, record: Recorder) -> None:
    """Give a fresh cache the prefill that was recorded."""
    for layer, seen in zip(cache.layers, record.layers, strict=True):
        received = seen.received(layer.keep.last_queries) if layer.watches else None
        numbers = seen.query, seen.key, seen.value
        layer.fill(*numbers, seen.visibility, seen.scaling, received, seen.softcap)


def recorded(model, layers: int, ids: Tensor, mask: Tensor | None, last: bool) -> tuple[Recorder, Tensor]:
    """One pass over the prompts, few rows at a time: activations then stay in the processor's cache."""
    parts, logits = [], []
    for rows in torch.arange(len(ids)).split(max(1, TOKENS // ids.shape[1])):
        parts.append(Recorder(layers))
        real = None if mask is None else mask[rows]
        logits.append(Stepper(model, parts[-1]).feed(ids[rows], attention_mask=real, last=last))
    if len(parts) == 1:
        return parts[0], logits[0]
    record = Recorder(layers)
    record.join(parts, mask)
    return record, torch.cat(logits)


@torch.inference_mode()
def shared(model, caches: dict, ids: Tensor, mask: Tensor | None, last: bool) -> Iterator[tuple]:
    """Prefill every cache with one prompt batch: yields (name, Stepper, logits), one after the other.

    ids, mask `[batch, tokens]`; logits as `Stepper.feed` returns them (the same tensor for all but
    `recompute`, which makes its own pass), or the exception that a method raised. A cache is let go
    when the next one is asked for.
    """
    record = logits = None
    for name, cache in caches.items():
        try:
            cache.reset()
            stepper = Stepper(model, cache)
            if cache.recompute or len(caches) == 1:
                found = stepper.feed(ids, attention_mask=mask, last=last)
            else:
                if record is None:
                    record, logits = recorded(model, len(cache.layers), ids, mask, last)
                fill(cache, record)
                stepper.ids, stepper.padded = ids, mask is not None
                stepper.mask = torch.ones_like(ids) if mask is None else mask
                found = logits
        except Exception as error:
            found = error
        yield name, stepper, found
        cache.reset()
