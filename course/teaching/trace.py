"""What a cache holds: which tokens one head holds, fetches and has lost at every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.decode import Stepper
from kvlab.make import make_cache
from kvlab.store import Exact

from .pictures import EVICTED, FETCHED, HOST, KEPT, NOTHING, QUANTIZED


@dataclass(frozen=True)
class HeldTokens:
    """states `[steps, tokens]`, indices into `pictures.STATES`; row 0 is the prompt after the prefill,
    row i the i-th decode step. ids `[tokens]`: what was fed, the prompt and all generated tokens but the
    last. generated: the tokens the model wrote, `[steps]`."""

    states: Tensor
    ids: Tensor
    generated: Tensor

    def count(self, state: int, step: int = -1) -> int:
        """Tokens in this state at one step (default: the last)."""
        return int((self.states[step] == state).sum())


def held_by_step(model, ids: Tensor, method, steps: int = 8, *, layer: int = -1, head: int = 0) -> HeldTokens:
    """Decode `steps` tokens greedily after the prompt `ids` `[1, tokens]` and write down what one KV head
    of one layer holds at each step.

    method: a spec such as "h2o:budget=0.2", or a fresh cache. Returns `HeldTokens`.
    Raises ValueError for more than one row, or for a layer or head the model does not have.
    """
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"ids has shape {tuple(ids.shape)}: expected [1, tokens]")
    cache = make_cache(model, method) if isinstance(method, str) else method
    if cache.recompute:
        raise ValueError("method 'recompute' holds no tokens")
    if not -len(cache.layers) <= layer < len(cache.layers):
        raise ValueError(f"layer={layer}: the model has {len(cache.layers)} layers")
    observed = cache.layers[layer]
    if not 0 <= head < observed.kv_heads:
        raise ValueError(f"head={head}: the model has {observed.kv_heads} KV heads")
    stepper, rows = Stepper(model, cache), []
    read = LastRead(observed)
    fed, generated = ids.to(model.device), []
    for _ in range(steps):
        read.forget()
        logits = stepper.feed(fed, last=True)
        fed = logits.argmax(-1, keepdim=True)
        generated.append(fed[0, 0])
        rows.append(token_states(observed, read)[head])
    states = torch.full((steps, stepper.ids.shape[1]), NOTHING)
    for step, row in enumerate(rows):
        states[step, : len(row)] = row
    return HeldTokens(states, stepper.ids[0].cpu(), torch.stack(generated).cpu())


class LastRead:
    """What a layer's last decode step attended with and to: the query `[batch, heads, 1, head_dim]`, and the
    positions `[batch, kv_heads, n]` of the tokens (-1: none); None after a prefill."""

    def __init__(self, layer):
        self.forget()
        layer.on_read = self._note

    def forget(self) -> None:
        self.positions: Tensor | None = None
        self.query: Tensor | None = None

    def _note(self, layer, held, slots, query) -> None:
        positions = layer.slot_positions  # as they are before the keep evicts
        if slots is not None:
            positions = positions.gather(2, slots.clamp(min=0)).masked_fill(slots < 0, -1)
        self.positions, self.query = positions, query


def token_states(layer, read: LastRead) -> Tensor:
    """The state of every token seen so far, `[kv_heads, tokens]`."""
    states = torch.full((layer.kv_heads, layer.seen), EVICTED)
    exact = type(layer.store.format) is Exact
    at_rest = HOST if layer.place.on_host else KEPT if exact else QUANTIZED
    _mark(states, layer.slot_positions[0], at_rest)
    if layer.place.on_host and read.positions is not None:
        _mark(states, read.positions[0], FETCHED)
        states[:, -1] = KEPT  # the newest token was computed on the device
    return states


def _mark(states: Tensor, positions: Tensor, state: int) -> None:
    heads, slots = (positions >= 0).nonzero(as_tuple=True)
    states[heads.cpu(), positions[heads, slots].long().cpu()] = state
