"""Stage throughput: tokens per second against the batch, to the end of memory (H2O's experiment, 2,048 +
2,048).

Zhang et al. 2023 compare the largest batch of the full cache with that of a fifth of it. Here caches hold
random K and V as long as at the beginning, the middle and the end of the 2,048 new tokens; a step of each is
timed and a Simpson mean taken as the time of a token. `hf-dynamic` is transformers' own cache. The batch
doubles until memory ends; `end` says how.
"""

from __future__ import annotations

import statistics

import torch

import kvlab
from kvlab.spec import parse

from . import models
from .bench import out_of_memory
from .step import their_cache
from .unit import FIRST, LAST, NEXT, Unit

METHODS = {
    "static": FIRST, "h2o": FIRST, "int8": NEXT, "int4": NEXT, "paged": NEXT, "hf-dynamic": LAST,
    "sinks": LAST,
}  # fmt: skip
STEPS = 3  # at each length
LARGEST = 4096  # rows


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {"model": "small-opt", "prompt": 32, "new": 32, "largest": 4}
        return [
            Unit("throughput", f"small-opt, {method}", FIRST, 5, given | {"method": method})
            for method in ("static", "h2o", "hf-dynamic")
        ]
    given = {"model": "OPT-6.7B", "prompt": 2048, "new": 2048, "largest": LARGEST}
    return [
        Unit("throughput", f"OPT-6.7B, {method}", rank, 13, given | {"method": method})
        for method, rank in METHODS.items()
    ]


def measure(bench, model: str, method: str, prompt: int, new: int, largest: int) -> dict:
    name, made = model, models.made(bench, model)
    made = models.theirs(made) if method == "hf-dynamic" else made
    rows, batch, end = [], 1, "the largest batch that was asked for"
    while batch <= largest:
        try:
            rows.append(at_batch(bench, made, name, method, prompt, new, batch))
        except Exception as error:
            if not out_of_memory(error):
                if "CUDA error" in str(error) or not rows:
                    raise
                end = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            else:
                end = "memory"
                between = batch * 3 // 4
                bench.tidy()
                if batch >= 4 and between > batch // 2:
                    try:
                        rows.append(at_batch(bench, made, name, method, prompt, new, between))
                    except Exception as last:
                        if not out_of_memory(last):
                            raise
            bench.say(f"{name}, {method}: batch {batch} is too large ({end})")
            break
        batch *= 2
    bench.tidy()
    best = max(rows, key=lambda row: row["tokens_per_s"], default=None)
    if best is None:
        raise MemoryError(f"{name}, {method}: not even one row of {prompt + new} tokens fits")
    best["best"] = True
    return {"rows": rows, "line": f"{best['tokens_per_s']:.0f} tokens/s at batch {best['batch']}", "end": end}


def at_batch(bench, model, name: str, method: str, prompt: int, new: int, batch: int) -> dict:
    """One batch: the mean time of a step between the prompt's length and the end."""
    lengths = (prompt + new - STEPS - 2, prompt + new // 2, prompt)  # the longest first: it decides what fits
    held, size = {}, 0
    with bench.peak(bench.allocated()) as peak:
        for tokens in lengths:
            cache = filled(bench, model, method, tokens, prompt, prompt + new, batch)
            ids = models.next_ids(bench, batch)

            @torch.no_grad()
            def step(cache=cache, ids=ids):
                model(ids, past_key_values=cache, use_cache=True)

            bench.wall(step)
            held[tokens] = statistics.median(bench.wall(step) for _ in range(STEPS))
            if not size:
                size = bytes_of(cache)
            del cache, step
            bench.tidy()
    last, middle, first = (held[tokens] for tokens in lengths)
    ms = (first + 4 * middle + last) / 6
    row = {"model": name, "method": method, "batch": batch, "prompt": prompt, "new": new, "step_ms": ms}
    ends = {"first_ms": first, "middle_ms": middle, "last_ms": last, "bytes": size}
    return row | ends | {"tokens_per_s": batch / ms * 1e3, **peak}


def filled(bench, model, method: str, tokens: int, prompt: int, longest: int, batch: int):
    """A cache as it is when a row has seen `tokens` tokens, of which `prompt` were the prompt."""
    if method == "hf-dynamic":
        return their_cache(method, model, tokens, batch, bench)
    spec = parse(method)
    if spec.name == "static":
        spec = type(spec)(spec.text, spec.method, {"length": longest})
    cache = kvlab.make_cache(model, spec)
    # A keep that evicts holds a part of the prompt for good, however much is written after it.
    evicts = cache.attending[0].evicts
    models.fill(bench, model, cache, prompt if evicts else tokens, batch)
    return cache


def bytes_of(cache) -> int:
    from ..speed.models import tensor_bytes

    return cache.stats().device_bytes if hasattr(cache, "stats") else tensor_bytes(cache)
