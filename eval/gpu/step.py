"""Stage step: a whole decode step of a model, every method, beside transformers' own caches.

The caches hold random K and V of a stated length; every step appends a token, as decoding does, and some
steps of each method of a unit, one after the other, are timed in turn by the host's clock, from an idle
device to an idle device. `way` is how they are launched: `eager`, or `graph`, kvlab's graph engine, which
decodes. transformers' caches have none: there one step's kernels are replayed from a CUDA graph, which writes
the same slot each time. `bytes` are those of the cache.
"""

from __future__ import annotations

import re

import torch

import kvlab
from kvlab.measure.machines import fill_random
from kvlab.spec import name_of, parse
from kvlab.store import Float8, Int, Static

from . import models
from .bench import spread
from .unit import FIRST, LAST, NEXT, Unit, groups

METHODS = (  # the most telling first: transformers' caches, and those that they are compared with
    "hf-static", "hf-dynamic", "static", "full", "int8",
    "int4", "fp8", "h2o", "snapkv", "kivi2",
    "hf-fp8", "static-int8", "static-fp8", "static-int4", "kivi4",
    "sinks", "tova", "pyramidkv", "int2:group=32", "paged",
    "infinigen:budget=0.1", "offload", "offload+int4", "offload+h2o", "topk",
    "uvm",
)  # fmt: skip
OFFLOADING = ("infinigen", "offload", "offload+int4", "offload+h2o", "topk", "uvm")  # threads: no graph
REPEATS, WARM, SPARE = 7, 4, 192  # times counted, steps before, and tokens a preallocated buffer has room for
LOOP = {"eager": 1, "graph": 8}  # steps in a row
FORMATS = {"static-int8": Int(8), "static-int4": Int(4), "static-fp8": Float8()}  # in a buffer of one size


WAYS = ("eager", "graph")


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {"model": "small-llama", "tokens": 96, "batch": 2, "methods": ["hf-static", "static", "h2o"]}
        return [Unit("step", f"small-llama, {way}", FIRST, 10, given | {"way": way}) for way in WAYS]
    sizes = (("Llama-3-8B", 8192, 1, FIRST, WAYS), ("Llama-3-8B", 2048, 16, LAST, ("eager",)))
    return [
        Unit("step", f"{model}, {tokens} tokens, batch {batch}, {way} {number}",
             max(rank, NEXT if any(map(offloads, methods)) else FIRST), 4 + 3 * len(methods),
             {"model": model, "tokens": tokens, "batch": batch, "methods": methods, "way": way})
        for model, tokens, batch, rank, ways in sizes
        for way in ways
        for number, methods in enumerate(groups([m for m in METHODS if way == "eager" or stays(m)]), 1)
    ]  # fmt: skip


def offloads(method: str) -> bool:
    return name_of(method) in OFFLOADING


def stays(method: str) -> bool:
    """Whether its steps may be captured."""
    return not offloads(method) and method != "hf-fp8"


def bits(method: str) -> int:
    """Bits of a number in a method's cache: what it is compared with has as many."""
    found = re.search(r"(?:int|fp|kivi)(\d)", method)
    return int(found[1]) if found else 16


def measure(bench, model: str, tokens: int, batch: int, methods: list[str], way: str) -> dict:
    rows, calls = {}, {}
    for method in methods:
        row = {"method": method, "model": model, "tokens": tokens, "batch": batch, "bits": bits(method)}
        rows[method] = row = row | {"way": way, "offloads": offloads(method)}
        try:
            run = Run(bench, model, method, tokens, batch, way)
            for _ in range(WARM):
                run.step()
            row["bytes"] = run.bytes()
            calls[method] = run.launched(way)
        except Exception as error:
            row["left_out"] = bench.left_out(method, error)
        run = None
        bench.tidy()
    weights = models.weight_bytes(model)
    for method, times in bench.interleaved(calls, REPEATS, bench.wall).items():
        row = rows[method]
        row |= spread([ms / LOOP[way] for ms in times])
        row["gbps"] = (weights + row["bytes"]) / row["ms"] / 1e6
        row["fraction"] = row["gbps"] * 1e9 / bench.bandwidth
    line = ", ".join(f"{method} {rows[method]['ms']:.2f} ms" for method in calls)
    return {"rows": list(rows.values()), "line": line}


class Run:
    """One method on one model: a cache that holds `tokens` tokens, and a step."""

    def __init__(self, bench, name: str, method: str, tokens: int, batch: int, way="eager"):
        self.ids, self.bench = models.next_ids(bench, batch), bench
        self.position, self.theirs = tokens, method.startswith("hf-")
        self.growing, self.alive = way == "graph" and method == "hf-dynamic", []
        self.model = models.for_method(bench, name, method, way)
        if self.theirs:
            self.cache = their_cache(method, self.model, tokens, batch, bench)
        else:
            self.cache = our_cache(bench, self.model, method, tokens)
            fill_random(self.model, self.cache, tokens, batch)

    @torch.no_grad()
    def step(self) -> None:
        positions = {}
        if self.theirs and "Llama" in type(self.model).__name__:
            positions = {"position_ids": torch.full_like(self.ids[:1], self.position)}
        if self.growing:  # a graph of one step reads what the next one would let go
            self.alive += [(layer.keys, layer.values) for layer in self.cache.layers]
        self.model(self.ids, past_key_values=self.cache, use_cache=True, **positions)
        self.position += 1

    def launched(self, way: str):
        """What makes `LOOP` steps in a row. ValueError where they are not replayed."""
        step = self.step
        if way == "graph" and self.theirs:
            step = self.bench.captured(self.step) or self.step
        elif way == "graph" and self.bench.on_gpu and not self.model.forward.replays(self.cache):
            raise ValueError("; ".join(self.model.forward.said) or "its step is not captured")

        def several(holds=self) -> None:  # what a graph writes to must not be let go
            for _ in range(LOOP[way]):
                step()

        return several

    def bytes(self) -> int:
        """Bytes that the cache holds on the device."""
        if not self.theirs:
            return self.cache.stats().device_bytes
        from ..speed.models import tensor_bytes

        return tensor_bytes(self.cache)


def our_cache(bench, model, method: str, tokens: int):
    """The method's cache; over a real link where it offloads, in a buffer that is long enough under `static`.
    `static-FORMAT` is a format in such a buffer."""
    from kvlab.place import CudaLink, Link

    if method in FORMATS:
        return kvlab.KVCache(model, store=Static(tokens + SPARE, FORMATS[method]))
    spec, more = parse(method), {}
    if spec.name == "static":
        more["length"] = tokens + SPARE
    if "link" in spec.method.parameters:
        more["link"] = CudaLink(bench.device) if bench.on_gpu else Link()
    return kvlab.make_cache(model, type(spec)(spec.text, spec.method, spec.parameters | more))


def their_cache(name: str, model, tokens: int, batch: int, bench):
    """A cache of transformers' own that holds random K and V of `tokens` tokens."""
    from ..speed.baselines import cache_of

    shape = kvlab.models.ModelShape.of(model)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=bench.device, dtype=model.dtype) for _ in "kv")
    cache = cache_of("hf-quantized" if name == "hf-fp8" else name, model.config, tokens + SPARE)
    for layer in range(shape.layers):
        cache.update(keys, values, layer)
    return cache
