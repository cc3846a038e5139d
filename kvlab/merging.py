"""Merging: dropped tokens join the kept token with the most similar key (D2O, Wan et al. 2024, arXiv
2406.13035)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from .gather import among, gather_slots
from .store.growing import Growing
from .store.static import Static

BLOCK = 256  # tokens compared with all kept ones at a time


def check_merges(store, place) -> None:
    """ValueError for a store or a place in which a kept token cannot be rewritten."""
    if place.on_host or type(store) not in (Growing, Static) or not store.as_they_are or store.sinks:
        raise ValueError("merge rewrites tokens: they must be on the device, unrounded, in one buffer")


def merge(layer, slots: Tensor) -> None:
    """Before a layer drops everything except `slots` `[batch, kv_heads, n]` (-1: nothing), merge the dropped.

    Each dropped token finds the kept token of its KV head whose key has the largest cosine c with its own. If
    c is at least the head's threshold, its key and value, times c, join those of that token, which becomes
    the mean of itself and of all that join it. Otherwise the token is lost. The threshold of a head is the
    mean of c over all tokens dropped together; from the second time on, half of that plus half of the old
    threshold. Keys are taken after RoPE. Nothing is random, and rows and heads are independent. Deviations
    from D2O: a threshold for each KV head (the official code averages over heads those tokens that leave in
    the same place, which may be different ones); one budget for all layers (there it depends on the variance
    of their attention); its first four tokens are not protected.

    Writes to `layer.store`, and to `layer.keep.threshold` `[batch, kv_heads]`.
    """
    keys, values = layer.store.read(slots.device)  # [batch, kv_heads, slots, head_dim]
    going = (layer.slot_positions >= 0) & ~among(slots, layer.slots)
    order = going.int().argsort(dim=-1, descending=True, stable=True)[..., : int(going.sum(-1).max())]
    if not order.shape[2]:
        return
    there = going.gather(-1, order)
    wide = torch.promote_types(keys.dtype, torch.float32)
    likeness, nearest = _nearest(keys.to(wide), order, slots)
    threshold = _threshold(layer.keep.threshold, likeness, there)
    weights = likeness * (there & (likeness >= threshold[..., None]))
    joins = (weights != 0).to(wide)
    total = [gather_slots(x, slots).to(wide) for x in (keys, values)]
    count = torch.ones_like(total[0][..., :1])
    for start in range(0, order.shape[2], BLOCK):
        part = slice(start, start + BLOCK)
        onto = one_hot(nearest[..., part], slots.shape[2]).to(wide).transpose(2, 3)  # [batch, h, n, block]
        count += onto @ joins[..., part, None]
        for x, held in zip(total, (keys, values), strict=True):
            x += onto @ (weights[..., part, None] * gather_slots(held, order[..., part]).to(wide))
    row, head, place = (slots >= 0).nonzero(as_tuple=True)
    where = row, head, slots[row, head, place]
    for (buffer,), x in zip((layer.store.keys, layer.store.values), total, strict=True):
        buffer[where] = (x / count)[row, head, place].to(buffer.dtype)
    layer.keep.threshold = threshold


def _nearest(keys: Tensor, order: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """For the tokens in slots `order` `[batch, kv_heads, m]`: the largest cosine of their key with that of a
    kept token, and the index of this token."""
    units = normalize(keys, dim=-1)
    kept, found = gather_slots(units, slots).transpose(2, 3), []
    for start in range(0, order.shape[2], BLOCK):
        cosines = gather_slots(units, order[..., start : start + BLOCK]) @ kept
        found.append(cosines.masked_fill((slots < 0)[:, :, None], -torch.inf).max(-1))
    return torch.cat([x.values for x in found], -1), torch.cat([x.indices for x in found], -1)


def _threshold(before: Tensor | None, likeness: Tensor, there: Tensor) -> Tensor:
    """The threshold `[batch, kv_heads]` of the tokens dropped now; infinity if none was dropped yet."""
    mean = ((likeness * there).sum(-1) / there.sum(-1)).masked_fill(~there.any(-1), torch.inf)
    if before is None:
        return mean
    return torch.where(before.isinf(), mean, torch.where(mean.isinf(), before, (before + mean) / 2))
