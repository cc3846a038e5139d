"""Bound: the base of every kvlab cache, which belongs to a model in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from .parameters import check_whole
from .saved import save


class Bound(Cache):
    """A cache that belongs to a model in this process: copied by `copy.deepcopy`, never pickled."""

    recompute = False  # True only for the method that keeps nothing
    prefilling = False  # whether a `prefill` block is open
    spec = None  # the `Spec` that `make_cache` made it from
    continues = True  # whether a text may continue with a pass of several tokens
    broken = False  # whether a pass broke off half-done
    fed = False  # whether a pass began since it was made, loaded or reset
    renumbers = False  # whether distances count only the tokens held (see `KVCache.renumbers`)
    stepped = False  # whether the caller says where a prompt ends (see `turns.py`)
    lengths: Sequence[int] = ()  # real tokens seen, per row
    attending: Sequence = ()  # layers that hold K and V
    gapless = False  # whether padding between a row's tokens would change the row

    @property
    def max_cache_len(self) -> int:
        """Prefix tuning (PEFT) reads this before it replaces the cache by another one."""
        raise AttributeError(
            "kvlab's caches do not serve a model whose prefix has keys and values of its own"
        )

    def offload(self, *_, **__) -> None:
        raise ValueError("the method decides where tokens are: kvlab.make_cache(model, 'offload')")

    prefetch = offload

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        check_whole("repeats", repeats, 1, "copies")
        if self.lengths:
            self.reorder_cache(torch.arange(len(self.lengths), device="cpu").repeat_interleave(repeats))

    def check_whole(self) -> None:
        """RuntimeError for a cache that is broken."""
        if self.broken:
            raise RuntimeError("the last pass through this cache broke off: start again with cache.reset()")

    @contextmanager
    def prefill(self) -> Iterator[None]:
        """See `KVCache.prefill`. Nothing is compressed here, so nothing is held back."""
        before, self.prefilling = self.prefilling, True
        try:
            yield
        finally:
            self.prefilling = before

    def filled(self, ids: Tensor, mask: Tensor | None = None) -> None:
        """See `KVCache.filled`. Unused here."""

    def save(self, path) -> None:
        """Write its contents to a safetensors file, with versions and a digest of the model;
        `kvlab.load_cache(path, model)` reads it. Raises ValueError for a cache not made by `make_cache`, for
        one with a link, or with layers of another kind, and for a path that cannot be written; RuntimeError
        for one whose last pass broke off."""
        save(self, path)

    def hold(self) -> None:
        """See `KVCache.hold`. Nothing is ever dropped here."""

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"a {type(self).__name__} belongs to a model in this process and cannot be pickled: "
            "copy.deepcopy(cache) copies it"
        )
