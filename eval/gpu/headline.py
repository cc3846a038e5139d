"""Stage headline: InfiniGen's experiment (Lee et al. 2024) on this GPU, on its own link and on one of 16
GB/s.

An OPT-13B shape with random weights; FlexGen is `offload`, FlexGen with INT4 and with H2O at a fifth are
`offload+int4` and `offload+h2o`, UVM is `uvm`, InfiniGen fetches a tenth, the ideal holds everything on the
device. The prompt really runs, 64 tokens longer than the paper's, so that the few steps that are timed stand
in the middle of the 128 that it writes; `total_s` is the prompt's time and 128 times the median of theirs.
Unified memory is modelled as everywhere in kvlab: on the real link its pages cost nothing besides their
bytes, which flatters it; on the throttled one they pay for their faults. No managed memory is asked for. On
the throttled link the prompt is not run again: its time is worked out from that on the real link
(`prefill_modelled`). `predicted` is the simulator with this machine's measured bandwidth, operations and
link; `error`, `error_prefill` and `error_total` are what it is off in a step, in the prompt and in `total_s`,
in per cent of what stands in the row.
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
from kvlab.arithmetic import Machine
from kvlab.link import Link
from kvlab.measure.timeline import Timeline, record
from kvlab.place import CudaLink
from kvlab.spec import parse

from . import link as links
from . import models, predict
from .bench import out_of_memory
from .unit import FIRST, LAST, NEXT, Unit

COUNTED = 3  # steps, after one that is not
PARTS = ("project", "attention", "ffn", "selection", "stall")
PAGE_LATENCY = 10e-6  # seconds that a transfer of the throttled link pays
HOST_PART = 0.7  # of the host's free memory that caches may take
PINNED_ROUNDING = 2.1  # a pinned buffer takes up to the next power of two


def units(size: str) -> list[Unit]:
    if size == "dry":
        given = {"model": "small-opt", "prompt": 96, "batch": 2, "systems": list(predict.SYSTEMS)}
        return [Unit("headline", "small-opt, 96 tokens, batch 2", FIRST, 25, given)]
    everything, some = list(predict.SYSTEMS), ["full", "offload", "infinigen"]
    return [
        Unit("headline", f"OPT-13B, {prompt} tokens, batch {batch}", rank, seconds,
             {"model": "OPT-13B", "prompt": prompt, "batch": batch, "systems": systems})
        for prompt, batch, systems, rank, seconds in (
            (1920, 20, everything, FIRST, 130), (384, 8, some, NEXT, 8), (896, 8, some, NEXT, 11),
            (1408, 8, some, NEXT, 15), (1920, 8, everything, LAST, 70),
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


class Waiting(Timeline):
    """A timeline whose cuts wait for the device, so that its spans are those of kernels."""

    def __init__(self, bench):
        super().__init__()
        self._bench = bench

    def cut(self, what: str, layer: int | None = None) -> None:
        self._bench.sync()
        super().cut(what, layer)


class ThrottledCudaLink(Throttle, CudaLink):
    """The real link, which can be slowed down."""


class ThrottledLink(Throttle, Link):
    """The same where there is no GPU."""


def measure(bench, model: str, prompt: int, batch: int, systems: list[str]) -> dict:
    name = model
    made = models.made(bench, name)
    machine = asked(bench)
    batch = fitting(bench, name, prompt, batch)
    about = {"model": name, "prompt": prompt, "batch": batch}
    if bench.on_gpu and "offload" in systems:
        warm(bench, made, prompt, batch)
    rows = []
    for system in systems:
        try:
            serves = models.for_method(bench, name, predict.SYSTEMS[system])
            rows += of_system(bench, serves, system, about)
        except Exception as error:
            if "CUDA error" in str(error) and not out_of_memory(error):
                raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            bench.say(f"{system}: left out: {why[:140]}")
            rows.append({"system": system, **about, "left_out": why})
        bench.tidy()
    put_beside(rows, machine, models.shape_of(name), about)
    said = line(rows)
    return {"rows": [*rows, {"system": "the simulator's machine", **about, **vars(machine)}], "line": said}


def asked(bench) -> Machine:
    """This machine as the simulator knows one: all measured now."""
    size = 2**28 if bench.on_gpu else 2**20
    host, here = links.pinned(bench, size), links.device(bench, size)
    times = bench.interleaved({"copy": lambda: here.copy_(host, non_blocking=True)}, 5)["copy"]
    return Machine(bench.flops, bench.bandwidth, size / statistics.median(times) * 1e3, 100e9)


def fitting(bench, name: str, prompt: int, batch: int) -> int:
    """The largest batch whose cache fits on the device beside the weights, and twice into pinned memory."""
    sizes = [batch >> step for step in range(batch.bit_length())]
    held = prompt + predict.STEPS

    def on_device(rows: int) -> float:
        return 1.3 * models.kv_bytes(name, held, rows)

    found = bench.shrunk(sizes, on_device, f"{name}, {prompt} tokens: batch")
    free = HOST_PART * psutil.virtual_memory().available
    while found > 1 and PINNED_ROUNDING * models.kv_bytes(name, held, found) > free:
        found //= 2
        bench.say(f"{name}, {prompt} tokens: the host has {free / 1e9:.0f} GB for caches: batch {found}")
    return found


def warm(bench, model, prompt: int, batch: int) -> None:
    """One prompt into pinned memory, which the allocator keeps: what follows does not pay for locking
    pages."""
    with contextlib.suppress(Exception):  # whoever is measured says what is wrong
        started(bench, model, "offload", prompt, batch)
    bench.tidy()


def started(bench, model, system: str, prompt: int, batch: int):
    """(cache that holds a prompt and writes at its middle, its link, seconds that the prompt took)."""
    spec = parse(predict.SYSTEMS[system])
    link = None
    if system == "full":
        spec = replace(spec, parameters={"length": prompt + predict.STEPS})
    else:
        link = ThrottledCudaLink(bench.device) if bench.on_gpu else ThrottledLink()
        spec = replace(spec, parameters=spec.parameters | {"link": link})
    cache = kvlab.make_cache(model, spec)
    generator, tokens = torch.Generator().manual_seed(prompt), prompt + predict.STEPS // 2
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
    for bandwidth in (math.inf, predict.PUBLISHED_LINK):
        if link is not None:
            link.bandwidth = bandwidth
        elif rows:  # nothing crosses: the same bar stands beside both
            rows.append(rows[0] | {"link": "throttled"})  # its prompt is that which was measured
            continue
        times, parts, moved = [], [], 0

        @torch.no_grad()
        def step():
            model(ids, past_key_values=cache)

        for number in range(COUNTED + 1):
            if link is not None:
                begun = len(link.records)
            taken = bench.wall(step)
            if number:
                times.append(taken)
                moved = cache.stats().moved_bytes
                if link is not None:
                    done = [t for t in list(link.records)[begun:] if t.waited is not None]
                    parts.append(sum(t.waited[1] - t.waited[0] for t in done) * 1e3)
        ms = statistics.median(times)
        slower = 0.0 if link is None else later(system, prefill, link.seconds(out))
        total = prefill + slower + predict.STEPS * ms / 1e3
        rows.append({
            "block": breakdown(bench, model, cache),
            "system": system, "method": predict.SYSTEMS[system], **about,
            "link": "real" if bandwidth == math.inf else "throttled",
            "prefill_s": prefill + slower, "prefill_modelled": bandwidth != math.inf, "step_ms": ms,
            "step_ms_low": min(times), "step_ms_high": max(times),
            "steps": COUNTED, "total_s": total, "moved_bytes": moved,
            "waits_ms": statistics.median(parts) if parts else 0.0,
        })  # fmt: skip
    return rows


def later(system: str, prefill: float, out: float) -> float:
    """Seconds that a prompt of so many takes longer where K and V need `out` seconds to leave: beside the
    computation, under unified memory after it (as in `predict.prefill_seconds`)."""
    return out if system.startswith("uvm") else max(0.0, out - prefill)


def breakdown(bench, model, cache) -> dict[str, float]:
    """Milliseconds of one layer by part, where the device is waited for at every cut: the sum is longer than
    a step that is left alone."""
    ids = models.next_ids(bench, len(cache.attending[0].lengths))
    with torch.no_grad(), record(model, cache, Waiting(bench)) as timeline:
        model(ids, past_key_values=cache)
    return {part: timeline.total(part) * 1e3 / len(cache.attending) for part in PARTS}


def put_beside(rows: list[dict], machine: Machine, shape, about: dict) -> None:
    """Ratios within one link, and the simulator's prediction of every bar."""
    for where, carries in (("real", machine.link), ("throttled", predict.PUBLISHED_LINK)):
        here = {row["system"]: row for row in rows if row.get("link") == where}
        on = Machine(machine.flops, machine.memory, min(carries, machine.link), machine.host_memory)
        said = predict.headline(on, shape, about["prompt"], about["batch"])
        for system, row in here.items():
            row["predicted"] = said[system]
            for key, name in (
                ("step_ms", "error"),
                ("prefill_s", "error_prefill"),
                ("total_s", "error_total"),
            ):
                row[name] = 100 * (said[system][key] / row[key] - 1)
            if "offload" in here:
                row["faster"] = here["offload"]["total_s"] / row["total_s"]
                row["faster_step"] = here["offload"]["step_ms"] / row["step_ms"]
            if "full" in here:
                row["of_ideal"] = row["step_ms"] / here["full"]["step_ms"]


def line(rows: list[dict]) -> str:
    found = [row for row in rows if row["system"] == "infinigen" and {"faster", "of_ideal"} <= row.keys()]
    return "; ".join(
        f"infinigen, {row['link']} link: {row['faster']:.2f} times offload, {row['of_ideal']:.2f} of ideal"
        for row in found
    )
