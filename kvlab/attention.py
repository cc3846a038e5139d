"""Attention: the function that transformers calls, and the arithmetic behind it.

Between `past_key_values.update(...)` and the attention function the models of transformers do nothing with
K and V. So `KVCache.update` returns the layer object itself in place of both, and the function registered
here asks that object to attend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "kvlab"
QUERY_BLOCK = 256  # queries attended at a time, so that no T x T matrix of weights is ever held


def kvlab_attention(module, query, key, value, attention_mask, *, scaling=None, **kwargs):
    """The attention function of transformers' AttentionInterface.

    query `[batch, heads, queries, head_dim]`; key and value are a kvlab cache layer (or plain tensors
    `[batch, kv_heads, tokens, head_dim]` when no cache is used); attention_mask is the caller's
    `[batch, tokens seen]` padding mask or None. Returns (out `[batch, queries, heads, head_dim]`, None).
    """
    for name in ("softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"kvlab attention does not support {name!r}, which {type(module).__name__} uses")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: expected a padding mask [batch, tokens]"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = kwargs.get("sliding_window")
    if isinstance(key, Tensor):
        if (records := _records.get()) is not None:
            records.append(Recorded(query, key, value, attention_mask, scaling, window))
        positions = None if attention_mask is None else own_positions(attention_mask)[:, None]
        out, _ = prefill(query, key, value, positions, scaling, window)
    else:
        key.check_model(module)
        out = key.attend(query, attention_mask, scaling, window)
    return out.transpose(1, 2).contiguous(), None


def padding_mask(*, attention_mask=None, **_):
    """The mask function of AttentionMaskInterface: hand the caller's padding mask through unchanged."""
    return attention_mask


@cache
def register() -> None:
    """Enter both functions into transformers' interfaces, whose import brings the modelling code along."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, kvlab_attention)
    AttentionMaskInterface.register(NAME, padding_mask)


@dataclass
class Recorded:
    """What one layer's attention was given in a pass without a cache.

    query `[batch, heads, tokens, head_dim]`, keys (after RoPE) and values `[batch, kv_heads, tokens,
    head_dim]`; mask `[batch, tokens]` (1: no padding) or None; window: of sliding attention, or None.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scaling: float
    window: int | None


_records: ContextVar[list[Recorded] | None] = ContextVar("kvlab_records", default=None)


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    """While it lasts, passes of kvlab's models without a cache are recorded: yields a list with one entry
    per layer and pass, in the order in which the layers attend."""
    records: list[Recorded] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


@torch.no_grad()
def recorded(model, ids: Tensor) -> list[Recorded]:
    """What every layer's attention is given while the model reads `ids` `[batch, tokens]`, without a cache.

    model: one that attends through kvlab (`models.prepare`).
    """
    with recording() as layers:
        model(ids.to(model.device), use_cache=False)
    return layers


def own_positions(mask: Tensor) -> Tensor:
    """Position of every token among its row's real tokens, -1 for padding; `[batch, tokens]` -> same."""
    real = mask.bool()
    return (real.long().cumsum(-1) - 1).masked_fill(~real, -1)


def visible(queries: Tensor, keys: Tensor, window: int | None = None) -> Tensor:
    """Which keys a query may see: real ones that are not later than itself, within the sliding window.

    queries `[batch, q]`, keys `[batch, 1 or kv_heads, slots]` are positions, -1 for padding. Returns bool
    `[batch, 1 or kv_heads, q, slots]`. A padding query sees everything, so that its (unused) output stays
    finite.
    """
    queries, keys = queries[:, None, :, None], keys[:, :, None, :]
    seen = (keys >= 0) & (keys <= queries)
    if window is not None:
        seen = seen & (queries - keys < window)
    return seen | (queries < 0)


def attend(query, keys, values, scaling, allowed=None, watch=None):
    """Softmax attention of a few queries over held keys and values.

    query `[batch, heads, q, head_dim]`, keys and values `[batch, kv_heads, slots, head_dim]`, allowed bool
    `[batch, 1 or kv_heads, q, slots]` or None. watch: None, or bool `[batch, q]`: the queries whose weights
    are to be summed up; values may then be None, and so is out. Returns (out `[batch, heads, q, head_dim]`,
    received `[batch, kv_heads, slots]` or None): received is the weight of every slot, averaged over the
    query heads of the group.
    """
    batch, heads, count, _ = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    if watch is None:
        if count == 1 or group == 1:  # the query heads of a group are just more queries of one KV head
            allowed = None if allowed is None else _spread(allowed, group)
            grouped = query.reshape(batch, kv_heads, group * count, -1)
            out = scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed, scale=scaling)
            return out.reshape(query.shape), None
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed.repeat_interleave(group, dim=1)
        out = scaled_dot_product_attention(
            query, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=True
        )
        return out, None
    grouped = query.reshape(batch, kv_heads, group * count, -1)
    weights = (grouped @ keys.transpose(-1, -2)).float().mul_(scaling)
    if allowed is not None:
        weights.masked_fill_(~_spread(allowed, group), -torch.inf)
    weights = weights.softmax(-1)
    out = None if values is None else (weights.to(values.dtype) @ values).reshape(query.shape)
    counted = weights.view(batch, kv_heads, group, count, -1).mul_(watch[:, None, None, :, None])
    return out, counted.sum((2, 3)) / group


def _spread(allowed: Tensor, group: int) -> Tensor:
    """`[batch, h, q, slots]` -> `[batch, h, group * q, slots]`, the order in which heads are grouped."""
    if group == 1:
        return allowed
    return allowed[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)


def prefill(query, keys, values, positions, scaling, window=None, watches=False, last=None):
    """Causal attention of a whole prompt over itself, `QUERY_BLOCK` queries at a time where needed.

    query `[batch, heads, tokens, head_dim]`, keys and values `[batch, kv_heads, tokens, head_dim]`;
    positions `[batch, 1, tokens]` (-1: padding) or None when no token is padding. values may be None where
    only the attention received `watches` is wanted: then so is out. Returns (out like query,
    received `[batch, kv_heads, tokens]` or None): attention received is summed over the real queries, or
    over the `last` of them.
    """
    batch, heads, tokens, _ = query.shape
    if keys.shape[2] != tokens:
        raise ValueError("kvlab attention needs a kvlab cache: make one with kvlab.make_cache(model, ...)")
    if positions is None and not watches and window is None:
        gqa = heads != keys.shape[1]
        out = scaled_dot_product_attention(
            query, keys, values, is_causal=tokens > 1, scale=scaling, enable_gqa=gqa
        )
        return out, None
    if positions is None:
        positions = torch.arange(tokens, device=query.device).expand(batch, 1, -1)
    out = None if values is None else torch.empty_like(query)
    received = query.new_zeros(batch, keys.shape[1], tokens, dtype=torch.float32) if watches else None
    for start in range(0, tokens, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, tokens)
        asked = positions[:, 0, start:end]
        allowed = visible(asked, positions[..., :end], window)
        watch = _watched(asked, positions, last) if watches else None
        if watch is None and values is None:
            continue
        held = keys[:, :, :end], None if values is None else values[:, :, :end]
        block, weights = attend(query[:, :, start:end], *held, scaling, allowed, watch)
        if values is not None:
            out[:, :, start:end] = block
        if watch is not None:
            received[..., :end] += weights
    return out, received


def _watched(asked: Tensor, positions: Tensor, last: int | None) -> Tensor | None:
    """Which of these queries `[batch, q]` are watched: the real ones among the row's last; None: no one."""
    real = asked >= 0
    if last is None:
        return real
    real = real & (asked > positions.amax(-1) - last)
    return real if bool(real.any()) else None


def group_importance(scores: Tensor, kv_heads: int) -> Tensor:
    """Reduce the scores of the query heads to their KV head, for ranking tokens.

    scores `[batch, heads, slots]` (-inf: not there) -> `[batch, kv_heads, slots]`. With one query head per
    KV head the score itself ranks; in a group it is the mean of the heads' softmax weights.
    """
    batch, heads, slots = scores.shape
    if heads == kv_heads:
        return scores
    return scores.softmax(-1).view(batch, kv_heads, heads // kv_heads, slots).mean(2)
