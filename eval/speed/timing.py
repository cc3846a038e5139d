"""Timing one method in one process: kvlab's loop, transformers' caches through `generate`, or llama.cpp.

Everything here times a batch of one row.

    prefill_ms   prompt of (context - STEPS) tokens: median over repeats
    decode_ms    one token: median over the steps of all repeats; decode_ms_min and _max are the
                 smallest and largest of the repeats' own medians
    bytes        allocated by the cache after the last step, on device and host; moved by that step
    read_gbps    bytes a step must read (weights once, cache as held, bytes moved) / its time, 10^9 B/s
    waited       part of the time in which the process had no core: others were busy (see `BUSY`)
    fraction_of_bandwidth   read_gbps / the machine's measured read bandwidth

`measure` of a class returns what one repeat found, `summarize` makes the numbers of these. What
it returns goes into the cell and into speed.json as it is; `eval/report/tables.py` says what is shown.

transformers' caches (see `baselines.py`) run with its own sdpa attention on a model of their own. llama.cpp
reads a file of the same model, its weights as narrow as those of kvlab's engine.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

import kvlab
from kvlab.arithmetic import kv_bytes_per_token, read_bandwidth
from kvlab.faster import engine_of
from kvlab.models import ModelShape

from . import llama
from .baselines import BASELINES, LLAMA, cache_of
from .models import STEPS, WIDE_CONTEXT, load, prompt, tensor_bytes, weight_bytes

STEPS_RECOMPUTE = 3  # tokens decoded per repeat by `recompute`, where each step costs a prefill


def timed_generate(model, ids: torch.Tensor, tokens: int, **options) -> list[float]:
    """transformers' greedy `generate` with a clock: ms of the prefill and of every further token."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    stamps = []

    class Stamp(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            if ids.device.type == "cuda":
                torch.cuda.synchronize(ids.device)
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    started = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Stamp()]),
        **options,
    )
    return [(after - before) * 1e3 for before, after in pairwise([started, *stamps])]


class Ours:
    """One kvlab method, timed with kvlab's own loop."""

    def __init__(self, options: dict):
        self.model, self.method = load(options, "kvlab"), options["method"]
        self.engine, self.weights = engine_of(self.model), weight_bytes(self.model)

    def measure(self, context: int) -> dict:
        cache = kvlab.make_cache(self.model, self.method)
        steps = STEPS_RECOMPUTE if cache.recompute else STEPS
        trace = kvlab.decode(self.model, prompt(self.model, context), cache, steps + 1)
        return {
            "prefill_ms": trace.ms[0],
            "steps_ms": trace.ms[1:],
            "device_bytes": trace.device_bytes[-1],
            "host_bytes": trace.host_bytes[-1],
            "moved_bytes": trace.moved_bytes[-1],
            "tokens_held": trace.tokens_held[-1],
        }


def on_device(ms: list[float], size: int, tokens: int) -> dict:
    """What one repeat found of a cache of so many bytes and tokens that has nothing on a host."""
    found = {"prefill_ms": ms[0], "steps_ms": ms[1:], "device_bytes": size, "tokens_held": tokens}
    return found | {"host_bytes": 0, "moved_bytes": 0}


class Theirs:
    """One transformers cache, timed through `generate` with a time stamp after every token."""

    def __init__(self, options: dict):
        self.model, self.kind = load(options, "sdpa"), options["method"]
        self.engine, self.weights = "eager", weight_bytes(self.model)

    def measure(self, context: int) -> dict:
        ids, cache = prompt(self.model, context), cache_of(self.kind, self.model.config, context + 1)
        ms = timed_generate(self.model, ids, STEPS + 1, past_key_values=cache)
        return on_device(ms, tensor_bytes(cache), ids.shape[1] + STEPS)


class Llama:
    """llama.cpp with one type of K and V, on as many threads as torch has here."""

    def __init__(self, options: dict):
        self.model = load(options, "sdpa")
        self.kind, _, flash = options["method"].removeprefix(LLAMA).partition("-")
        self.flash, weights = bool(flash) or self.kind != "f32", options.get("weights", "fp32")
        self.engine = "llama.cpp" + (f", {weights} weights" if weights != "fp32" else "")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.gguf"
            self.weights = llama.write(self.model, file, llama.OF_WEIGHTS[weights])
            self.loaded = llama.Model(file)  # the mapping outlives the name

    def measure(self, context: int) -> dict:
        ids, threads = prompt(self.model, context)[0].tolist(), torch.get_num_threads()
        run = llama.Context(self.loaded, self.kind, self.flash, context + 1, threads)
        stamps = [time.perf_counter()]
        for part in (ids, *([1] for _ in range(STEPS))):
            run.feed(part)
            stamps.append(time.perf_counter())
        run.close()
        ms = [(after - before) * 1e3 for before, after in pairwise(stamps)]
        held = kv_bytes_per_token(ModelShape.of(self.model), llama.BITS[self.kind]) * run.held
        return on_device(ms, int(held), run.held)


def setup(options: dict, report: Callable) -> Callable:
    """A worker's handler: a context -> one repeat's measurements; "about" -> their provenance."""
    method = options["method"]
    timed = (Llama if method.startswith(LLAMA) else Theirs if method in BASELINES else Ours)(options)
    shape = ModelShape.of(timed.model)
    longest = shape.context or WIDE_CONTEXT
    timed.measure(min(64, longest))  # first-use costs fall here
    computes = timed.model.device.type == "cpu" and "link=" not in options["method"]  # without waiting

    def handle(job):
        if job == "bandwidth":
            return read_bandwidth(0.5, timed.model.device)
        if job == "about":
            return {
                "longest": longest,
                "weight_bytes": timed.weights,
                "token_bytes": kv_bytes_per_token(shape, 8 * timed.model.dtype.itemsize),
                "device": str(timed.model.device),
                "engine": timed.engine,
            }
        wall, busy = time.perf_counter(), time.thread_time()
        found = timed.measure(job)
        wall, busy = time.perf_counter() - wall, time.thread_time() - busy
        return found | {"seconds": wall, "waited": max(0.0, 1 - busy / wall) if computes else 0.0}

    return handle


def summarize(context: int, found: list[dict], about: dict, bandwidth: float) -> dict:
    """One entry of speed.json from the repeats of one method at one context."""
    steps = [ms for one in found for ms in one["steps_ms"]]
    medians = [statistics.median(one["steps_ms"]) for one in found]
    prefill = [one["prefill_ms"] for one in found]
    last, decode = found[-1], statistics.median(steps)
    held = min(last["device_bytes"], last["tokens_held"] * about["token_bytes"])
    read = about["weight_bytes"] + held + last["moved_bytes"]
    rate = read / (decode / 1e3)
    return {
        "context": context,
        "prefill_ms": statistics.median(prefill),
        "decode_ms": decode,
        **{name: last[name] for name in ("device_bytes", "host_bytes", "moved_bytes")},
        "fraction_of_bandwidth": rate / bandwidth,
        "prefill_ms_min": min(prefill),
        "prefill_ms_max": max(prefill),
        "decode_ms_min": min(medians),
        "decode_ms_max": max(medians),
        "read_gbps": rate / 1e9,
        "bandwidth_gbps": bandwidth / 1e9,
        "tokens_held": last["tokens_held"],
        "engine": about["engine"],
        "repeats": len(found),
        "waited": statistics.mean(one.get("waited", 0.0) for one in found),
    }
