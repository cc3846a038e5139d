"""Decode attention over a store's packed bytes: when a kernel can do it, its call, and the reference."""

from __future__ import annotations

import importlib.util
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from ..arithmetic import count_kernel
from ..attention import attend
from ..store.float8 import Float8
from ..store.int import Int

ALL = np.zeros((1, 1, 0), np.bool_)  # no mask: every token is allowed
TOLERANCE = 0.02  # relative: what half precision may cost; a wrong kernel is off by far more


def reference(query: Tensor, store, scaling: float, allowed: Tensor | None = None) -> Tensor:
    """What the kernels compute, in torch: decode everything, then attend. See `attend_packed`."""
    keys, values = store.read(query.device)
    return attend(query, keys, values, scaling, allowed)[0]


def fits(store, query: Tensor) -> bool:
    """Whether a kernel can attend with this query `[batch, heads, 1, head_dim]` to what the store holds.

    It can for one fp32 query on the CPU, a head dimension that is a multiple of 32, and symmetric int8 or
    int4 with a scale per group of channels, or 8-bit floats without scale. Smaller heads gain nothing.
    On a GPU it can where triton is there, for what `gpu.supports`.
    """
    if query.shape[2] != 1 or not store.kernel_ready:
        return False
    if on_gpu(query):
        return _fits_gpu(store, query)
    if query.dtype != torch.float32 or query.device.type != "cpu" or query.shape[3] % 32:
        return False
    if _layout(store, query.shape[3]) is None:
        return False
    return all(part.is_contiguous() for part in (*store.keys, *store.values)) and _numba()


def attend_packed(query: Tensor, store, scaling: float, allowed: Tensor | None = None) -> Tensor:
    """Softmax attention of one query per row over packed K and V, `[batch, heads, 1, head_dim]` -> same.

    allowed: bool `[batch, 1 or kv_heads, 1, tokens]` or None. Only where `fits`. Equal to `reference` to 1e-5
    relative. On more than one thread the splits are shared out; the result does not change by that.
    """
    count_kernel(4 * query.numel() * store.length)
    if on_gpu(query):
        return _attend_gpu(query, store, scaling, allowed)
    from . import cpu

    query = store.format.turn(query)
    batch, heads, _, head_dim = query.shape
    kv_heads, count = store.keys[0].shape[1], store.length
    kernel = cpu.compiled(*_layout(store, head_dim))
    mask = ALL if allowed is None else allowed[:, :, 0].expand(batch, -1, -1).contiguous().numpy()
    arrays = (query[:, :, 0] * scaling).contiguous().numpy(), *_numpy(store.keys), *_numpy(store.values), mask
    splits = -(-count // cpu.SPLIT)
    items, share = batch * kv_heads * splits, heads // kv_heads
    parts = torch.empty(items, share, head_dim + 2)
    threads = min(torch.get_num_threads(), items)
    if threads == 1:
        kernel(*arrays, count, 0, items, parts.numpy())
    else:
        cuts = [items * thread // threads for thread in range(threads + 1)]
        jobs = [_pool().submit(kernel, *arrays, count, *cut, parts.numpy()) for cut in pairwise(cuts)]
        for job in jobs:
            job.result()
    parts = parts.view(batch, kv_heads, splits, share, head_dim + 2)
    total, weight, most = parts[..., :-2], parts[..., -2], parts[..., -1]
    if splits > 1:  # bring the splits to one common largest score, then add them up
        shrink = (most - most.amax(2, keepdim=True)).exp()
        total, weight = (total * shrink[..., None]).sum(2), (weight * shrink).sum(2)
    out = total.view(*query.shape) / weight.view(batch, heads, 1, 1)
    return store.value_format.turn_back(out).to(query.dtype)


def _layout(store, head_dim: int) -> tuple[int, int, int] | None:
    """(kind, head_dim, group) of the compiled kernel for this store, or None."""
    keys = _layout_of(store.format.coded, store.keys, head_dim)
    return keys if keys == _layout_of(store.value_format.coded, store.values, head_dim) else None


def _layout_of(form, parts: tuple[Tensor, ...], head_dim: int) -> tuple[int, int, int] | None:
    kind = type(form), len(parts)
    if kind == (Float8, 1) and form.scales is None:
        return {"e4m3": 2, "e5m2": 3}[form.format], head_dim, head_dim
    if kind != (Int, 2) or form.bits not in (4, 8) or not form.kernel_ready:
        return None
    codes, scales = parts
    groups = scales.shape[3]
    if codes.shape[:3] != scales.shape[:3] or head_dim % groups:
        return None
    return {8: 0, 4: 1}[form.bits], head_dim, head_dim // groups


def _numpy(parts: tuple[Tensor, ...]):
    """The codes and, as bits, their scales."""
    yield parts[0].numpy()
    scales = parts[1] if len(parts) > 1 else parts[0][..., :0]
    yield scales.view(torch.uint16 if len(parts) > 1 else torch.uint8).numpy()


# On a GPU.

_trusted: dict[tuple, bool] = {}  # (device, dtype, format, head dimension) -> the kernel agreed at first use


def on_gpu(query: Tensor) -> bool:
    return query.is_cuda


def _fits_gpu(store, query: Tensor) -> bool:
    if not _triton() or any(part.device != query.device for part in store.keys):
        return False
    from . import gpu

    form = store.format.coded
    same = _kind(form) == _kind(store.value_format.coded)
    known = _trusted.get(_case(store, query), True)
    return same and known and query.dtype in gpu.TYPES and gpu.supports(form, query.shape[3])


def _attend_gpu(query: Tensor, store, scaling: float, allowed: Tensor | None) -> Tensor:
    """By the Triton kernel. The first time that it meets a format on a device it is held against the
    reference: one that does not compile there, or says something else, is named and not used again."""
    from . import gpu

    def kernel() -> Tensor:
        turned = store.format.turn(query)
        out = gpu.attend(turned, *store.parts(), store.format.coded, scaling, allowed)
        return store.value_format.turn_back(out)

    case = _case(store, query)
    if case in _trusted:
        return kernel()
    right = reference(query, store, scaling, allowed)
    try:
        off = float((kernel() - right).float().norm() / right.float().norm())
        _trusted[case] = off < TOLERANCE
        why = f"it is {off:.2g} off the reference"
    except Exception as error:
        _trusted[case], why = False, f"{type(error).__name__}: {error}"
    if not _trusted[case]:
        warnings.warn(f"kvlab decodes without its kernel for {case[2:]} on {case[0]}: {why}", stacklevel=2)
    return right


def _case(store, query: Tensor) -> tuple:
    return query.device, query.dtype, _kind(store.format.coded), query.shape[3]


def _kind(form) -> tuple:
    """What tells two formats apart in the eyes of a kernel."""
    scales = getattr(form, "scales", None)
    shared = None if scales is None else (scales.axis, scales.group, scales.dtype)
    return type(form).__name__, getattr(form, "bits", None) or getattr(form, "format", None), shared


@cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads())


@cache
def _numba() -> bool:
    """Whether numba is there; said once when it is not."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        warnings.warn(f"kvlab decodes quantized caches without its compiled kernels ({error})", stacklevel=2)
        return False
    return True
