"""Reading: a prompt that is read once and given to every cache that is judged on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import Recorded, recording
from ..decode import Stepper
from ..make import make_cache
from ..recompute import NoCache


@dataclass
class Reading:
    """A pass over ids `[rows, tokens]` without a cache: the inputs of every layer's attention, and the logits
    after the last token `[rows, vocabulary]`."""

    model: object
    ids: Tensor
    layers: list[Recorded]
    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, model, ids: Tensor) -> Reading:
        with recording() as layers:
            logits = Stepper(model, NoCache(model)).feed(ids, last=True)
        return cls(model, ids, layers, logits)

    @torch.no_grad()
    def taken(self, method) -> Stepper:
        """A fresh cache that holds this prompt, and its `Stepper`. ValueError for a method that the model or
        these numbers refuse."""
        cache = make_cache(self.model, method)
        stepper = Stepper(self.model, cache)
        if cache.recompute or not getattr(cache, "fillable", False) or len(cache.layers) != len(self.layers):
            stepper.feed(self.ids, last=True)
            return stepper
        for layer, given in zip(cache.layers, self.layers, strict=True):
            layer.fill_pieces(given)
        cache.filled(self.ids)
        stepper.ids, stepper.mask = self.ids, torch.ones_like(self.ids)
        return stepper
