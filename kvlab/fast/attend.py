"""Decode attention over a store's bytes: the conditions for a kernel, its call, and the reference."""

from __future__ import annotations

import importlib.util
import warnings
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..arithmetic import count_kernel
from ..attention import attend
from ..store.exact import Exact
from ..store.float8 import Float8
from ..store.int import Int
from .known import coded, in_blocks, readable, turned

ALL = np.zeros((1, 1, 0), np.bool_)  # no mask: every token is allowed
UNOBSERVED = np.empty((0, 0, 0), np.float32), np.empty((0, 0), np.float32)  # no keep observes
NONE = {np.dtype(kind): np.zeros((1, 1, 0, 1), kind) for kind in (np.float32, np.uint16)}  # no token is new
EXACT = {torch.float32: 4, torch.bfloat16: 5}  # kinds of the kernel (`cpu.F32`, `cpu.BF16`)
LANES = 16  # channels that a kernel reads at a time, of one group
TOLERANCE = 0.02  # relative: what half precision may cost; a wrong kernel is off by far more


def reference(query: Tensor, store, scaling: float, allowed: Tensor | None = None) -> Tensor:
    """The kernels' computation in torch: decode everything, then attend. See `attend_packed`."""
    keys, values = store.read(query.device)
    return attend(query, keys, values, scaling, allowed)[0]


def fits(store, query: Tensor, observed: bool = False) -> bool:
    """Whether a kernel can attend with this query `[batch, heads, 1, head_dim]` to the store's tokens, and
    (observed) return the attention received by every token.

    It can for one query on the CPU, a head dimension that is a multiple of 32, and unrounded numbers in fp32
    or bf16, or, with an fp32 query, symmetric integers with a scale per group of channels, 8-bit floats
    without scale, 4-bit floats, codes of a codebook, or KIVI's blocks. Smaller heads gain nothing. On a GPU
    it can where triton is there, for what `gpu.supports` and for KIVI's blocks (`gpu_kivi.supports`), unless
    a keep observes.
    """
    if query.shape[2] != 1:
        return False
    if on_gpu(query):
        return not observed and _fits_gpu(store, query)
    if not readable(store) or query.device.type != "cpu" or query.requires_grad:
        return False
    if query.shape[3] % 32 or query.dtype != (kept_as(store) or torch.float32):
        return False
    if not all(part.is_contiguous() for part in (*store.keys, *store.values)):
        return False
    if not _numba():
        return False
    from . import sides

    return (layout(store, query.shape[3]) or sides.layout(store, query.shape[3])) is not None


def attend_packed(
    query: Tensor, store, scaling: float, allowed: Tensor | None = None, received: Tensor | None = None
) -> Tensor:
    """Softmax attention of one query per row over K and V in stored form.

    query `[batch, heads, 1, head_dim]` -> same; allowed: bool `[batch, 1 or kv_heads, 1, tokens]` or None.
    received: None, or fp32 `[batch, kv_heads, tokens]` to be filled with `received` as of `attention.attend`.
    Only where `fits`. Equal to `reference` to 1e-5 relative.
    """
    if on_gpu(query):
        count_kernel(4 * query.numel() * store.length)
        return _attend_gpu(query, store, scaling, allowed)
    batch, count = query.shape[0], store.length
    mask = ALL if allowed is None else allowed[:, :, 0].expand(batch, -1, -1).contiguous().numpy()
    kernel, held = prepared(store, query.shape)
    none = NONE.get(held[0].dtype, NONE[np.dtype(np.float32)])
    out = run(kernel, turned(store.format, query), scaling, (none, none), held, mask, count, received)
    return turned(store.value_format, out, back=True)


def prepared(store, query_shape: tuple[int, ...]):
    """(The compiled kernel for this store and queries of this shape; the arrays in which it reads codes and
    scales of K and of V)."""
    from . import cpu, sides

    heads, _, head_dim = query_shape[1:]
    if (known := layout(store, head_dim)) is None:
        return sides.prepared(store, head_dim)
    kernel = cpu.compiled(*known, cpu.at_once(heads // store.keys[0].shape[1]))
    return kernel, (*arrays(store.keys), *arrays(store.values))


def writes(store, head_dim: int) -> bool:
    """Whether the kernel of a store that `fits` can also write a token as its formats do."""
    from . import sides

    return layout(store, head_dim) is not None or sides.writes(store)


def run(
    kernel, query: Tensor, scaling: float, new, held, mask, count: int, received: Tensor | None = None
) -> Tensor | None:
    """Call the kernel: the output, or None if it refuses the new token.

    new, held, mask: numpy arrays, see `cpu.compiled`; count: tokens held, the new one included; received: see
    `attend_packed`.
    """
    from . import cpu

    batch, heads, _, head_dim = query.shape
    kv_heads, splits = held[0].shape[1], -(-count // cpu.SPLIT)
    items, share = batch * kv_heads * splits, heads // kv_heads
    out = torch.empty(batch, heads, 1, head_dim, dtype=torch.float32, device="cpu")
    parts, merged = np.empty((items, share, head_dim + 2), np.float32), out.view(-1, share, head_dim).numpy()
    observed = UNOBSERVED
    if received is not None:
        noted = np.empty((batch * kv_heads, share, count), np.float32)
        observed = noted, received.view(-1, count).numpy()
    given = query.float().contiguous().numpy(), np.float32(scaling)
    if not kernel(*given, *new, *held, mask, count, 0, items, parts, merged, *observed):
        return None
    count_kernel(4 * query.numel() * count)
    return out.to(query.dtype)


def kept_as(store) -> torch.dtype | None:
    """The dtype of unrounded numbers; None for codes."""
    return store.keys[0].dtype if type(coded(store.format)) is Exact else None


def layout(store, head_dim: int) -> tuple[int, int, int] | None:
    """(kind, head_dim, group) of the kernel that is compiled for this `readable` store alone, or None."""
    if in_blocks(store) or store.keys[0].shape != store.values[0].shape:  # V of another width than K
        return None
    keys = _layout_of(coded(store.format), store.keys, head_dim)
    return keys if keys == _layout_of(coded(store.value_format), store.values, head_dim) else None


def _layout_of(form, parts: tuple[Tensor, ...], head_dim: int) -> tuple[int, int, int] | None:
    kind = type(form), len(parts)
    if kind == (Exact, 1):
        known = EXACT.get(parts[0].dtype) if parts[0].shape[3] == head_dim else None
        return known if known is None else (known, head_dim, head_dim)
    if kind == (Float8, 1):
        return {"e4m3": 2, "e5m2": 3}[form.format], head_dim, head_dim
    if kind != (Int, 2) or form.bits not in (4, 8):
        return None
    codes, scales = parts
    group = head_dim // scales.shape[3]
    if codes.shape[:3] != scales.shape[:3] or group % LANES:
        return None
    return {8: 0, 4: 1}[form.bits], head_dim, group


def arrays(parts: tuple[Tensor, ...]):
    """The codes and, as bits, their scales."""
    codes, *scales = parts
    yield (codes.view(torch.uint16) if codes.dtype == torch.bfloat16 else codes).numpy()
    yield scales[0].view(torch.uint16).numpy() if scales else np.empty((*codes.shape[:3], 0), np.uint16)


# On a GPU.

_trusted: dict[tuple, bool] = {}  # (device, dtype, format, head dimension) -> the kernel agreed at first use


def on_gpu(query: Tensor) -> bool:
    return query.is_cuda


def _fits_gpu(store, query: Tensor) -> bool:
    if not readable(store) or not _triton():
        return False
    if any(part.device != query.device for part in store.keys) or not _trusted.get(_case(store, query), True):
        return False
    from . import gpu

    if query.dtype not in gpu.TYPES:
        return False
    if in_blocks(store):
        from . import gpu_kivi

        return store.window[0].dtype == query.dtype and gpu_kivi.supports(store, query.shape[3])
    form, keys = coded(store.format), store.keys[0]
    if keys.shape != store.values[0].shape:
        return False
    if type(form) is Exact and keys.stride(2) != keys.shape[3]:  # as a link brings it: torch makes no copy
        return False
    return form == coded(store.value_format) and gpu.supports(form, query.shape[3])


def _attend_gpu(query: Tensor, store, scaling: float, allowed: Tensor | None) -> Tensor:
    """By the Triton kernel. At its first use for a format on a device it is compared with the reference: if
    it does not compile, or differs, a warning names it and it is not used again."""
    from . import gpu

    def kernel() -> Tensor:
        if in_blocks(store):
            from . import gpu_kivi

            return gpu_kivi.attend(query, store, scaling, allowed)
        asked, form = turned(store.format, query), coded(store.format)
        out = gpu.attend(asked, *store.parts(), form, scaling, allowed)
        return turned(store.value_format, out, back=True)

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


def trusted(store, heads: int, head_dim: int) -> bool:
    """Whether the Triton kernel reads this store in a decode step, and agrees with the reference."""
    if not store.keys[0].is_cuda:
        return False
    shape = len(store.keys[0]), heads, 1, head_dim
    query = torch.randn(shape, device=store.keys[0].device, dtype=store.dtype)
    if not _fits_gpu(store, query):
        return False
    if _case(store, query) not in _trusted:
        _attend_gpu(query, store, head_dim**-0.5, None)
    return _trusted[_case(store, query)]


def _case(store, query: Tensor) -> tuple:
    kind = ("Kivi", store.format.bits, store.group) if in_blocks(store) else coded(store.format)
    return query.device, query.dtype, kind, query.shape[3]


@cache
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _numba() -> bool:
    """Whether numba is installed; warns once if not."""
    try:
        import numba  # noqa: F401
    except ImportError as error:
        warnings.warn(f"kvlab decodes quantized caches without its compiled kernels ({error})", stacklevel=2)
        return False
    return True
