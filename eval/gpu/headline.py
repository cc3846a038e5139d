"""Stage headline: InfiniGen's experiment (Lee et al. 2024) on this GPU, on its own link and on one of 16
GB/s.

An OPT-13B shape with random weights; FlexGen is `offload`, FlexGen with INT4 and with H2O at a fifth are
`offload+int4` and `offload+h2o`, UVM is `uvm`, InfiniGen fetches a tenth, the ideal holds everything on the
device. The prompt really runs, 64 tokens longer than the paper's, so that the few timed steps are in the
middle of the 128 that it writes; `total_s` is the prompt's time and 128 times the median of theirs. Unified
memory is modelled as everywhere in kvlab: on the real link its pages cost nothing besides their bytes, which
flatters it; on the throttled one they pay for their faults. No managed memory is asked for. On the throttled
link the prompt is not run again: its time is worked out from that on the real link (`prefill_modelled`).
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from dataclasses import replace

import psutil
import torch

import kvlab
from kvlab.arithmetic import kv_bytes
from kvlab.link import Link
from kvlab.models import ModelShape
from kvlab.place import CudaLink
from kvlab.spec import parse

from . import models
from .unit import FIRST, LAST, NEXT, Unit

PUBLISHED_LINK = 16e9  # bytes per second: the paper's PCIe 3.0
STEPS = 128  # tokens that the paper's experiment writes
SYSTEMS = ("full", "uvm", "uvm+h2o", "offload", "offload+int4", "offload+h2o", "infinigen")
MEASURED = {"full": "static", "infinigen": "infinigen:budget=0.1"}  # the method, where it has another name
COUNTED = 3  # steps, after one that is not
PAGE_LATENCY = 10e-6  # seconds that a transfer of the throttled link pays
HOST_PART = 0.7  # of the host's free memory that caches may take
PINNED_ROUNDING = 2.1  # a pinned buffer takes up to the next power of two


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {"model": "small-opt", "prompt": 96, "batch": 2, "systems": list(SYSTEMS)}
        return [Unit("headline", "small-opt, 96 tokens, batch 2", FIRST, 25, given)]
    some, rest = ["full", "offload", "infinigen"], ["offload+int4", "offload+h2o", "uvm", "uvm+h2o"]
    return [
        Unit("headline", f"OPT-13B, {prompt} tokens, batch {batch}{', the others' * (systems is rest)}", rank,
             seconds, {"model": "OPT-13B", "prompt": prompt, "batch": batch, "systems": systems})
        for prompt, batch, systems, rank, seconds in (
            (1920, 20, some, FIRST, 60), (1920, 8, some, NEXT, 30), (1920, 20, rest, NEXT, 100),
            (384, 8, some, NEXT, 8), (896, 8, some, LAST, 11), (1408, 8, some, LAST, 15),
            (1920, 8, rest, LAST, 40),
        )  # as the paper has it: all systems at batch 20, and lengths of text at batch 8
    ]  # fmt: skip


class Throttle:
    """Mixed into a link: no transfer is faster than `bandwidth` bytes per second (inf: as fast as it goes),
    and under unified memory pays for its pages."""

    bandwidth: float = math.inf
    page: int | None = None
    fault = 0.0

    def seconds(self, size: int) -> float:
        if self.bandwidth == math.inf:
            return 0.0
        if self.page is None:
            return PAGE_LATENCY + size / self.bandwidth
        return math.ceil(size / self.page) * (self.fault + self.page / self.bandwidth)

    def paged(self, page: int, fault: float):
        self.page, self.fault = page, fault
        return self


def throttled(bench) -> Link:
    """The real link, or where there is no GPU a pretended one, which can be slowed down."""
    kind = CudaLink if bench.on_gpu else Link
    return type("Throttled", (Throttle, kind), {})(*[bench.device] * bench.on_gpu)


def measure(bench, model: str, prompt: int, batch: int, systems: list[str]) -> dict:
    made = models.made(bench, model)
    about = {"model": model, "prompt": prompt, "batch": fitting(bench, model, prompt, batch)}
    if bench.on_gpu:
        warm(bench, made, prompt, about["batch"])
    rows = []
    for system in systems:
        try:
            serves = models.for_method(bench, model, MEASURED.get(system, system))
            rows += of_system(bench, serves, system, about)
        except Exception as error:
            rows.append({"system": system, **about, "left_out": bench.left_out(system, error)})
        bench.tidy()
    steps = ", ".join(f"{row['system']} {row['ms']:.0f} ms" for row in rows if row.get("link") == "real")
    return {"rows": rows, "line": steps}


def fitting(bench, name: str, prompt: int, batch: int) -> int:
    """The largest batch whose cache fits on the device beside the weights, and twice into pinned memory; says
    so where it is not the whole."""
    size = kv_bytes(ModelShape.of(models.published(name)), prompt + STEPS)
    here, host = bench.free_bytes() / 1.5, HOST_PART * psutil.virtual_memory().available / PINNED_ROUNDING
    rows = max(1, min(batch, int(min(here, host) // size)))
    if rows < batch:
        bench.say(f"{name}, {prompt} tokens: batch {batch} does not fit into memory: {rows} instead")
    return rows


def warm(bench, model, prompt: int, batch: int) -> None:
    """One prompt into pinned memory, which the allocator keeps: what follows does not pay for locking
    pages."""
    with contextlib.suppress(Exception):  # whoever is measured says what is wrong
        started(bench, model, "offload", prompt, batch)
    bench.tidy()


def started(bench, model, system: str, prompt: int, batch: int):
    """(cache that holds a prompt and writes at its middle, its link, seconds that the prompt took)."""
    spec = parse(MEASURED.get(system, system))
    link = None
    if system == "full":
        spec = replace(spec, parameters={"length": prompt + STEPS})
    else:
        link = throttled(bench)
        spec = replace(spec, parameters=spec.parameters | {"link": link})
    cache = kvlab.make_cache(model, spec)
    generator, tokens = torch.Generator().manual_seed(prompt), prompt + STEPS // 2
    ids = torch.randint(4, model.config.vocab_size, (batch, tokens), generator=generator).to(bench.device)
    bench.sync()
    begun = time.perf_counter()
    with torch.no_grad():
        model(ids, past_key_values=cache, logits_to_keep=1)
    if link is not None:
        link.drain()
    bench.sync()
    return cache, link, time.perf_counter() - begun


def of_system(bench, model, system: str, about: dict) -> list[dict]:
    """A system's rows: on the real link, and throttled."""
    cache, link, prefill = started(bench, model, system, about["prompt"], about["batch"])
    ids = models.next_ids(bench, about["batch"])
    out = 0 if link is None else sum(t.bytes for t in link.records if t.toward == "host")
    rows = []

    @torch.no_grad()
    def step():
        model(ids, past_key_values=cache)

    for where, bandwidth in (("real", math.inf), ("throttled", PUBLISHED_LINK)):
        if link is not None:
            link.bandwidth = bandwidth
        elif rows:  # nothing crosses: both get the same bar, with the measured prompt
            rows.append(rows[0] | {"link": where})
            continue
        times = bench.interleaved({"step": step}, COUNTED, bench.wall)["step"]
        ms = statistics.median(times)
        slower = 0.0 if link is None else later(system, prefill, link.seconds(out))
        rows.append({
            "system": system, **about, "link": where, "prefill_s": prefill + slower,
            "prefill_modelled": bandwidth != math.inf, "ms": ms, "ms_low": min(times), "ms_high": max(times),
            "repeats": COUNTED, "total_s": prefill + slower + STEPS * ms / 1e3,
            "moved_bytes": cache.stats().moved_bytes,
        })  # fmt: skip
    return rows


def later(system: str, prefill: float, out: float) -> float:
    """Seconds that a prompt of so many takes longer where K and V need `out` seconds to leave: beside the
    computation, under unified memory after it."""
    return out if system.startswith("uvm") else max(0.0, out - prefill)
