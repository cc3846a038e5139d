"""Hybrid: layers with one of transformers' own states (convolutions, recurrences), alone or beside K and
V."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin, LinearAttentionLayer

from .layer import Layer
from .modes import kept


class HybridLayer(LinearAttentionLayer, Layer):
    """K and V as in `Layer`; convolution and recurrent states as in transformers."""

    is_compileable = is_croppable = False

    def __init__(self, number_of_states: int, *args):
        self.number_of_states = number_of_states
        Layer.__init__(self, *args)

    def reset(self) -> None:
        LinearAttentionLayer.__init__(self, self.number_of_states)
        Layer.reset(self)

    def get_max_length(self) -> int:
        return Layer.get_max_length(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        LinearAttentionLayer.reorder_cache(self, beam_idx)
        Layer.reorder_cache(self, beam_idx)

    def check_crop(self, left: int) -> None:
        refuse_crop(self)

    def tensors(self) -> Iterator[tuple[bool, Tensor]]:
        yield from Layer.tensors(self)
        yield from ((False, tensor) for tensor in states_of(self))


def states_of(layer) -> Iterator[Tensor]:
    """The tensors of transformers' own state; none if a layer has no state."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for states in (layer.conv_states, layer.recurrent_states):
            yield from (tensor for tensor in states.values() if tensor is not None)


def keep_states(layers) -> None:
    """A pass outside torch's inference mode begins: it may write into states that were made inside."""
    if not torch.is_inference_mode_enabled():
        for layer in layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                for states in (layer.conv_states, layer.recurrent_states):
                    states |= {at: kept(x) for at, x in states.items() if x is not None}


def forget(layer) -> None:
    """Reset transformers' own state to before the first token, for a batch of any size."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.__init__(number_of_states=layer.number_of_states)


def moved_by_gaps(layers) -> str | None:
    """What padding between a row's tokens would do to the row; None: nothing."""
    for layer in layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            return f"moves the state of a {type(layer).__name__}"
        if isinstance(layer, Layer) and layer.store.in_blocks:
            return f"takes places in the blocks of {type(layer.store.policy).__name__}"
    return None


def check_no_gaps(layers, mask: Tensor | None, seen: int, lengths: Sequence[int]) -> None:
    """ValueError for a padding mask `[batch, tokens seen + new]` with padding between a row's tokens, or with
    a row that begins after a pass of one column, which transformers' states take for a token; layers: some
    are `moved_by_gaps`; lengths: real tokens seen, per row. Another mask of these is refused elsewhere."""
    if isinstance(mask, Tensor) and mask.dim() == 2:
        real = mask.bool()
        if seen and real[:, :seen].sum(-1).tolist() != [*lengths]:
            return
        what = moved_by_gaps(layers)
        states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
        if states and real.shape[1] == seen + 1 and not bool(real.any(-1).all()):
            raise ValueError(
                f"padding before a row's first token, in a pass of one column, {what}: expected passes of at "
                "least two"
            )
        later = real.int().flip(1).cummax(1).values.flip(1).bool()  # here, or behind it, the row has a token
        if bool((~real & later & (real.cumsum(1) > 0)).any()):
            raise ValueError(
                f"padding between a row's tokens {what}: expected rows of equal length after the prompt, or "
                "one row at a time"
            )


def refuse_crop(layer) -> None:
    """ValueError for a layer with a state, which has no tokens to remove."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        raise ValueError(
            f"crop: the state of a {type(layer).__name__} cannot go back; start again with cache.reset()"
        )
