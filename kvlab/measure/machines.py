"""Machines by name, and links scaled so that this machine shows their ratio of compute to transfer."""

from __future__ import annotations

import statistics
import weakref

import torch

from ..arithmetic import MACHINES, layer_seconds
from ..attention import Recorded
from ..cache import KVCache
from ..decode import now
from ..devices import entry_of
from ..link import CudaLink, Link, ModelledLink
from ..models import ModelShape, cache_name
from ..models.shape import check_model
from ..modes import keeping
from ..parameters import check_one_of, check_whole
from ..store import Static
from ..visibility import CAUSAL

_measured: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model -> {(tokens, batch): seconds}


def link_named(what, model) -> Link | None:
    """A link from the value of a method's `link=`.

    None: no link. A `Link`: itself. A number: a `ModelledLink` of so many bytes per second. "cuda": a
    `CudaLink` to the model's device. A name in `arithmetic.MACHINES`: `like(name, model)`.
    """
    if what is None or isinstance(what, Link):
        return what
    if isinstance(what, int | float) and not isinstance(what, bool):
        return ModelledLink(what)
    if what == "cuda":
        return CudaLink(model.device)
    if what in MACHINES:
        return like(what, model)
    raise ValueError(
        f"link={what!r}: expected bytes per second, 'cuda', none, or one of {', '.join(MACHINES)}"
    )


def like(machine: str, model, tokens: int = 2048, batch: int = 1) -> ModelledLink:
    """A link whose transfer takes as long, measured in layers of computation, as on the named machine.

    There, a layer of the model's shape in 16 bits computes for `layer_seconds` (a roofline) and its K and V
    need bytes / bandwidth. Here a layer is measured on this machine. So bandwidth here = bandwidth there *
    (layer there / layer here) * (bytes of a number here / 2); the latency is stretched by the same factor.
    tokens: tokens attended to, at most the model's context; batch: rows. The link says so in `about`.
    """
    check_one_of("machine", machine, MACHINES)
    check_model(model)
    check_whole("tokens", tokens, 1)
    check_whole("batch", batch, 1, "rows")
    shape, there = ModelShape.of(model), MACHINES[machine]
    tokens = min(tokens, (shape.context or tokens + 8) - 8)
    here = measured_layer_seconds(model, tokens, batch)
    expected = layer_seconds(there, shape, tokens, batch)
    slower = here / expected
    made = ModelledLink(there.link / slower * model.dtype.itemsize / 2, latency=10e-6 * slower)
    made.about = (
        f"{machine} carries {there.link / 1e9:g} GB/s and computes a layer of this model over {tokens} "
        f"tokens in {expected * 1e3:.3g} ms (16 bits); here it takes {here * 1e3:.3g} ms, {slower:.3g} times "
        f"as long, and a number has {8 * model.dtype.itemsize} bits"
    )
    return made


def measured_layer_seconds(model, tokens: int, batch: int = 1) -> float:
    """Seconds that one layer of a decode step takes here, everything on the device: the median of 5 steps
    over random K and V of `tokens` tokens. Measured once per model and size."""
    known = _measured.setdefault(model, {})
    if (tokens, batch) not in known:
        cache = KVCache(model, store=Static(tokens + 8))
        fill_random(model, cache, tokens, batch)
        ids = torch.zeros(batch, 1, dtype=torch.long, device=entry_of(model))
        times = []
        for _ in range(6):
            begun = now(model.device)
            with torch.no_grad():
                model(ids, **{cache_name(model): cache})
            times.append(now(model.device) - begun)
        known[tokens, batch] = statistics.median(times[1:]) / len(cache.layers)
    return known[tokens, batch]


@keeping()
def fill_random(model, cache, tokens: int, batch: int = 1) -> None:
    """Fill an empty cache with random K and V of `tokens` tokens, the same in every layer, as if a prompt had
    been fed: for timings, where a prefill would only cost time."""
    shape, generator = ModelShape.of(model), torch.Generator().manual_seed(0)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    drawn = (torch.randn(size, generator=generator, device="cpu") for _ in "kv")
    keys, values = (x.to(entry_of(model), model.dtype) for x in drawn)
    query = keys.repeat_interleave(shape.heads // shape.kv_heads, dim=1)
    for layer in getattr(cache, "attending", cache.layers):
        received = keys.new_ones(size[:3], dtype=torch.float32) if layer.observes else None
        layer.fill(Recorded(query, keys, values, CAUSAL, shape.head_dim**-0.5), received)
