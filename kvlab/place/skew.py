"""Skewing: the rotation that gathers a head's scores in few columns (InfiniGen, Lee et al. 2024)."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from ..models import calibration_ids
from .device import Device

_skews: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> {calibration text: skew}


def skewing_matrices(queries: Tensor) -> Tensor:
    """A_h = V of the singular value decomposition Q_h = U S V^T, one per KV head.

    queries `[kv_heads, tokens, head_dim]`, as attention sees them (after RoPE) -> `[kv_heads, head_dim,
    head_dim]`, fp32. A is orthogonal, so (Q A)(K A)^T = Q K^T.
    """
    queries = queries.float()
    few = queries.shape[1] < queries.shape[2]
    return torch.linalg.svd(queries, full_matrices=few).Vh.transpose(-1, -2).contiguous()


def skew(model, ids: list | None = None) -> list[Tensor]:
    """The skewing matrices of every layer, from one pass over calibration tokens (`[[id, ...]]`).

    Without ids: `models.calibration_ids(model)`. Computed once per model and calibration text.
    """
    from ..cache import KVCache  # the cache imports places, and only this function needs a cache
    from ..decode import Stepper

    ids = calibration_ids(model) if ids is None else torch.tensor(ids)
    key = (tuple(ids.flatten().tolist()), model.dtype)
    known = _skews.setdefault(model, {})
    if key not in known:
        cache = KVCache(model, place=_Recorder())
        Stepper(model, cache).feed(ids.to(model.device), last=True)
        known[key] = [skewing_matrices(layer.place.queries[0]) for layer in cache.layers]
    return known[key]


class _Recorder(Device):
    """Keeps the queries of the prompt, `[1, kv_heads, group * tokens, head_dim]`."""

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        self.queries = query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
