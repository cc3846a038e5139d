"""Stage step: a whole decode step of a model, every method, beside transformers' own caches.

The caches hold random K and V of a stated length; every step appends a token, as decoding does. Eager steps
are timed by the host's clock, from an idle device to an idle device, one of each method in turn. `graph_ms`
is one step's kernels replayed from a CUDA graph: it writes the same slot each time, so it says what a step
costs without launches and is no decode loop. `compiled_ms` is torch.compile of the model with transformers'
static cache, in a unit of its own; a kvlab cache is not offered to torch.compile: its counts of tokens are
numbers of Python's, which every step changes, so that every step would be compiled anew. Bytes and
`peak_bytes` are those of one cache alone. `times_theirs` is over the fastest of transformers' rows of the
same `bits` in the same unit and the same way of launching (eager beside eager, graph beside graph, and the
best of all ways, `best`).
"""

from __future__ import annotations

import gc
import importlib.util

import torch

import kvlab
from kvlab.spec import name_of
from kvlab.store import Float8, Int, Static

from . import models
from .bench import out_of_memory, spread
from .unit import FIRST, LAST, Unit

METHODS = (
    "full", "static", "static-int8", "static-int4", "static-fp8", "paged", "int8", "int4", "int2:group=32",
    "fp8", "kivi2", "kivi4", "sinks", "h2o", "snapkv", "tova", "pyramidkv", "offload",
    "offload+int4", "offload+h2o", "uvm", "topk", "infinigen:budget=0.1",
)  # fmt: skip
THEIRS = ("hf-dynamic", "hf-static", "hf-quantized", "hf-quanto", "hf-hqq")
COMPILED = "hf-static, compiled"
WAYS = ("eager", "graph", "compiled")
QUANTIZED = {
    "hf-quantized": {"backend": "fp8"},
    "hf-quanto": {"backend": "quanto", "nbits": 4},
    "hf-hqq": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
}
NEEDS = {"hf-quanto": "optimum", "hf-hqq": "hqq"}  # modules
STEPS, WARM, SPARE = 9, 2, 64  # steps counted, before them, and tokens a preallocated buffer has room for
BITS = {
    "static-int8": 8, "static-fp8": 8, "static-int4": 4, "int8": 8, "fp8": 8, "hf-quantized": 8, "int4": 4,
    "kivi4": 4, "hf-quanto": 4, "hf-hqq": 4, "int2": 2, "kivi2": 2,
}  # fmt: skip


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {
            "model": "small-llama",
            "tokens": 96,
            "batch": 2,
            "methods": ["full", "static", "int4", "h2o"],
        }
        return [Unit("step", "small-llama, 96 tokens, batch 2", FIRST, 10, given)]
    found = []
    for model, tokens, batch, rank, seconds in (
        ("Llama-3-8B", 8192, 1, FIRST, 50), ("OPT-13B", 1920, 1, LAST, 40),
        ("Llama-3-8B", 2048, 16, LAST, 40), ("Llama-3-8B", 32768, 1, LAST, 45),
    ):  # fmt: skip
        given = {"model": model, "tokens": tokens, "batch": batch, "methods": list(METHODS)}
        found.append(Unit("step", f"{model}, {tokens} tokens, batch {batch}", rank, seconds, given))
    given = {"model": "Llama-3-8B", "tokens": 8192, "batch": 1, "methods": ["static"]}
    compiled = given | {"theirs": ["hf-static", COMPILED]}
    found.append(Unit("step", "Llama-3-8B, 8192 tokens, batch 1, compiled", LAST, 110, compiled))
    return found


def measure(
    bench, model: str, tokens: int, batch: int, methods: list[str], theirs: list[str] = THEIRS
) -> dict:
    name, made = model, models.made(bench, model)
    batch = bench.shrunk(
        [batch >> step for step in range(batch.bit_length())],
        lambda rows: 4 * models.kv_bytes(name, tokens, rows), f"{name}, {tokens} tokens: batch",
    )  # fmt: skip
    about = {"model": name, "tokens": tokens, "batch": batch}
    rows, runs = {}, {}
    twin = models.theirs(made)
    for method in (*methods, *theirs):
        row = rows[method] = {"method": method, **about, "bits": bits(method)}
        if method in NEEDS and importlib.util.find_spec(NEEDS[method]) is None:
            rows[method] = row | {"left_out": f"{NEEDS[method]} is not installed"}
            continue
        try:
            before = bench.allocated()
            runs[method] = run = Run(bench, name, twin, method, tokens, batch)
            with bench.peak(before) as peak:  # of steps, not of filling the cache
                for _ in range(WARM):
                    run.step()
            row |= {"bytes": run.bytes(), "offloads": run.offloads, **peak}
        except Exception as error:
            runs.pop(method, None)
            left_out(bench, rows, method, error)
        bench.tidy()
        if method in runs and bench.free_bytes() < 2 * models.kv_bytes(name, tokens, batch):
            runs.pop(method)
            rows[method]["left_out"] = "no memory to hold it beside the others"
            bench.tidy()
    for _ in range(STEPS + 1):
        for method, run in list(runs.items()):
            try:
                run.times.append(bench.wall(run.step))
            except Exception as error:
                runs.pop(method)
                left_out(bench, rows, method, error)
    for method, run in runs.items():
        rows[method] |= {f"{run.way}_{part}": value for part, value in spread(run.times[1:]).items()}
    if bench.on_gpu:
        graphs(bench, rows, runs)
    weights = models.weight_bytes(name)
    for row in rows.values():
        best = min((row[f"{way}_ms"] for way in WAYS if f"{way}_ms" in row), default=None)
        if best:
            row["best_ms"] = best
            row["gbps"] = (weights + row["bytes"]) / best / 1e6
            row["fraction"] = row["gbps"] * 1e9 / bench.bandwidth
    for way in ("eager", "graph", "best"):
        beside(rows, f"{way}_ms")
    return {"rows": list(rows.values()), "line": line(rows.get("static", {}))}


def bits(method: str) -> int:
    """Bits of a number in a method's cache: what it is compared with has as many."""
    return BITS.get(name_of(method), 16)


def line(row: dict) -> str:
    said = [f"{way} {row[f'{way}_ms']:.2f} ms" for way in WAYS if f"{way}_ms" in row]
    return f"static: {', '.join(said)}" if said else "static: left out"


def left_out(bench, rows: dict, method: str, error: Exception) -> None:
    """Say why a method has no numbers; an error that spoils the device ends the unit."""
    if "CUDA error" in str(error) and not out_of_memory(error):
        raise error
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    rows[method] = rows[method] | {"left_out": why}
    bench.say(f"{method}: left out: {why[:140]}")
    gc.collect()


class Run:
    """One method on one model: a cache that holds `tokens` tokens, and a step."""

    def __init__(self, bench, name: str, twin, method: str, tokens: int, batch: int):
        self.times: list[float] = []
        self.ids = models.next_ids(bench, batch)
        self.position, self.hf = tokens, method in (*THEIRS, COMPILED)
        self.way = "compiled" if method == COMPILED else "eager"
        model = twin if self.hf else models.for_method(bench, name, method)
        if self.hf:
            self.cache = their_cache(method, model, tokens, batch, bench)
        else:
            self.cache = ours_of(bench, model, method, tokens)
            models.fill(bench, model, self.cache, tokens, batch)
        self.forward, self.llama = model, "Llama" in type(model).__name__
        if self.way == "compiled":
            self.forward = torch.compile(model, mode="reduce-overhead", dynamic=False)

    @property
    def offloads(self) -> bool:
        return not self.hf and self.cache.attending[0].place.on_host

    @torch.no_grad()
    def step(self) -> None:
        positions = {}
        if self.way == "compiled":
            torch.compiler.cudagraph_mark_step_begin()
        if self.hf and self.llama:
            positions = {"position_ids": torch.full_like(self.ids[:1], self.position)}
        self.forward(self.ids, past_key_values=self.cache, use_cache=True, **positions)
        self.position += 1

    def bytes(self) -> int:
        """Bytes that the cache holds on the device."""
        if not self.hf:
            return self.cache.stats().device_bytes
        from ..speed.models import tensor_bytes

        return tensor_bytes(self.cache)


FORMATS = {"static-int8": lambda: Int(8), "static-int4": lambda: Int(4), "static-fp8": Float8}


def ours_of(bench, model, method: str, tokens: int):
    """The method's cache; over a real link where it offloads, in a buffer that is long enough under `static`.
    `static-FORMAT` is a format in such a buffer."""
    from kvlab.place import CudaLink, Link
    from kvlab.spec import parse

    if method in FORMATS:
        return kvlab.KVCache(model, store=Static(tokens + SPARE, FORMATS[method]()))

    spec = parse(method)
    more = {}
    if spec.name == "static":
        more["length"] = tokens + SPARE
    if "link" in spec.method.parameters:
        more["link"] = CudaLink(bench.device) if bench.on_gpu else Link()
    return kvlab.make_cache(model, type(spec)(spec.text, spec.method, spec.parameters | more))


def their_cache(name: str, model, tokens: int, batch: int, bench):
    """A cache of transformers' own that holds random K and V of `tokens` tokens."""
    from transformers import DynamicCache, QuantizedCache, StaticCache

    shape = kvlab.models.ModelShape.of(model)
    size = (batch, shape.kv_heads, tokens, shape.head_dim)
    keys, values = (torch.randn(size, device=bench.device, dtype=model.dtype) for _ in "kv")
    if name in ("hf-static", COMPILED):
        cache = StaticCache(config=model.config, max_cache_len=tokens + SPARE)
    elif name in QUANTIZED:
        cache = QuantizedCache(config=model.config, **QUANTIZED[name])
    else:
        cache = DynamicCache(config=model.config)
    for layer in range(shape.layers):
        cache.update(keys, values, layer)
    return cache


def graphs(bench, rows: dict, runs: dict) -> None:
    """One step of each as a CUDA graph, replayed in turn; who cannot be captured says why."""
    replays = {}
    for method, run in runs.items():
        if run.offloads or run.way == "compiled":
            threads = "transfers run on threads of their own"
            rows[method]["no_graph"] = threads if run.offloads else "torch.compile captures its own"
            continue
        try:
            replays[method] = bench.captured(run.step)
        except Exception as error:
            if "CUDA error" in str(error) and not harmless(error):
                raise
            rows[method]["no_graph"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            bench.sync()
    for method, times in bench.interleaved(replays, STEPS, bench.wall).items():
        rows[method] |= {f"graph_{part}": value for part, value in spread(times).items()}


def harmless(error: Exception) -> bool:
    """Whether an error only says that what was done cannot be captured, or that memory did not suffice."""
    text = str(error).lower()
    return out_of_memory(error) or "captur" in text or "not permitted" in text


def beside(rows: dict, key: str) -> None:
    """How many times as long as the fastest of transformers' caches of the same precision."""
    fastest: dict[int, float] = {}
    for name in (*THEIRS, COMPILED):
        ms = rows.get(name, {}).get(key)
        if ms is not None:
            fastest[bits(name)] = min(ms, fastest.get(bits(name), ms))
    for name, row in rows.items():
        base = fastest.get(bits(name))
        if base is not None and key in row and not name.startswith("hf-"):
            row[f"{key[:-3]}_times_theirs"] = row[key] / base
