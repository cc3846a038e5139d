"""Padded static buffers measured beside common alternatives (docs/static_graph.md).

One process, one thread unless said, everything interleaved; where a table says CPU, other work on the machine
does not count. What is measured:

    engines    ms per token of 200 greedy tokens on the workshop model, and whether they are generate's
    managing   the KV manager's time per step on the wide random-weight model: policies, forms, S
    prompt     a prompt in chunks and token by token
    wide       several tokens in one pass against as many single ones, as a draft's guesses are tried
    numbers    K and V held in 32, 16 and 8 bits and multiplied as integers: time, bytes, error
    memory     growth of the process against the formula
    drift      error of int8 buffers over the steps, with scales fixed or computed again
    requests   bytes reserved and used by 64 requests of mixed lengths, and by 16 continuations of a prompt
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import torch

import kvlab
from kvlab.arithmetic import kv_bytes_per_token
from kvlab.decode import Stepper
from kvlab.models import ModelShape
from kvlab.static_graph import KVManager, PaddedCache, StaticGraphEngine
from kvlab.static_graph.graph import NUMBERS
from kvlab.static_graph.quantized import calibrate, drift
from kvlab.store import BlockPool, Paged

from ..accuracy.taskset import STORIES
from ..speed import models
from ..speed.timing import timed_generate

TOKENS = 200
PADDED = {
    f"padded, {form}-head, {policy}": {"form": form, "policy": policy}
    for form in ("multi", "single")
    for policy in ("double", "compromise", "shift", "ring")
} | {"padded, multi-head, double, int8": {"form": "multi", "numbers": "int8"}}


def workshop(attention: str):
    return models.load({"suite": "model", "model": None, "device": "cpu", "dtype": None}, attention)


def through(model, cache, ids) -> tuple[list[float], torch.Tensor]:
    """(ms per decode step, tokens) of kvlab's loop."""
    trace = kvlab.decode(model, ids, cache, TOKENS)
    return trace.ms[1:], trace.tokens[0]


def generate(model, ids) -> tuple[list[float], torch.Tensor]:
    """The same from transformers' `generate`, with a time stamp after every token."""
    ms, tokens = timed_generate(model, ids, TOKENS)
    return ms[1:], tokens


class Compiled:
    """transformers' StaticCache with a decode step from torch.compile."""

    def __init__(self, model, length: int):
        self.model, self.length = model, length
        self.step = torch.compile(model.forward, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def __call__(self, ids) -> tuple[list[float], torch.Tensor]:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=self.length)
        logits = self.model(ids, past_key_values=cache).logits
        tokens, ms = [logits[:, -1].argmax(-1)], []
        for at in range(ids.shape[1], ids.shape[1] + TOKENS - 1):
            start = time.perf_counter()
            logits = self.step(tokens[-1][:, None], position_ids=torch.tensor([[at]]), past_key_values=cache)
            tokens.append(logits.logits[:, -1].argmax(-1))
            ms.append((time.perf_counter() - start) * 1e3)
        return ms, torch.cat(tokens)


def engines(length: int, repeats: int = 3, compiled: bool = True) -> dict:
    """Every way to decode, S = length: {name: {"ms", "min", "equal", "ratio", "manage"}}."""
    ours, theirs = workshop("kvlab"), workshop("sdpa")
    ids = models.prompt(ours, length - TOKENS - 1 + models.STEPS)
    made = {name: StaticGraphEngine(ours, length, **options) for name, options in PADDED.items()}
    ways = {"transformers generate, growing": lambda: generate(theirs, ids)}
    for name, spec in (("growing, eager", "full"), ("static, eager", f"static:length={length}")):
        ways[name] = lambda spec=spec: through(ours, kvlab.make_cache(ours, spec), ids)
    if compiled:
        step = Compiled(workshop("sdpa"), length)
        ways["static, compiled"] = lambda: step(ids)
    for name, engine in made.items():
        ways[name] = lambda engine=engine: through(ours, PaddedCache(engine), ids)
    found: dict[str, list] = {name: [] for name in ways}
    for name, way in ways.items():
        if name not in made:
            way()  # first-use costs, compilation included; an engine has none left
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(way())
    wanted = found["transformers generate, growing"][0][1]
    base = statistics.median(ms for one, _ in found["transformers generate, growing"] for ms in one)
    table = {}
    for name, runs in found.items():
        middle = statistics.median(ms for one, _ in runs for ms in one)
        equal = all(torch.equal(tokens, wanted) for _, tokens in runs)
        table[name] = {"ms": middle, "ratio": base / middle, "equal": equal}
        if name in made:
            table[name]["manage"] = made[name].manage_seconds / made[name].step_seconds
    return table


def managing(lengths=(512, 2048, 8192), steps: int = 24) -> dict:
    """The KV manager's share of a step on the wide model, one token after another."""
    model = models.load({"suite": "wide", "device": "cpu"}, "kvlab")
    table = {}
    for length in lengths:
        for form in ("single", "multi"):
            engine = StaticGraphEngine(model, length, form=form, chunk=1)
            for policy in ("double", "shift"):
                engine.policy, times = policy, []
                manager = engine.manager()
                manager.buffers.fill(0.01)  # real memory: pages never written would all be one page of zeros
                for step in range(steps + 4):
                    before = engine.step_seconds, engine.manage_seconds
                    engine.feed(manager, [step + 2])
                    times.append((engine.step_seconds - before[0], engine.manage_seconds - before[1]))
                step_ms, manage_ms = (statistics.median(column) * 1e3 for column in zip(*times[4:]))
                table[f"{length} {form} {policy}"] = {
                    "step_ms": step_ms,
                    "manage_ms": manage_ms,
                    "share": manage_ms / step_ms,
                    "copied_bytes": manager.copied_bytes // (steps + 4),
                    "reserved_bytes": manager.reserved_bytes,
                }
                del manager
    return table


def prompts(length: int = 512, tokens: int = 448, chunks=(1, 16, 64)) -> dict:
    """CPU ms for a prompt in chunks, through a graph of that width, and token by token."""
    model = workshop("kvlab")
    ids = models.prompt(model, tokens + models.STEPS)[0].tolist()
    table = {}
    for chunk in chunks:
        engine, times = StaticGraphEngine(model, length, chunk=chunk), []
        for _ in range(3):
            manager, start = engine.manager(), time.process_time()
            engine.feed(manager, ids)
            times.append((time.process_time() - start) * 1e3)
        table[f"chunks of {chunk}"] = statistics.median(times)
    return table


def wide(length: int = 512, held: int = 384, widths=(4, 8), repeats: int = 25) -> dict:
    """CPU ms of one pass of several tokens, and of as many single ones, taken in turn."""
    model = workshop("kvlab")
    ids = models.prompt(model, held + max(widths) + models.STEPS)[0].tolist()
    table = {}
    for width in widths:
        engine, times = StaticGraphEngine(model, length, chunk=width), ([], [])
        manager = engine.manager()
        engine.feed(manager, ids[:held])
        for _ in range(repeats + 2):
            for ms, pieces in zip(
                times, ([ids[held : held + width]], [[x] for x in ids[held : held + width]])
            ):
                start = time.process_time()
                for piece in pieces:
                    engine.feed(manager, piece)
                ms.append((time.process_time() - start) * 1e3)
                manager.crop(width)
        together, apart = (statistics.median(ms[2:]) for ms in times)
        table[f"{width} tokens"] = {"together": together, "one by one": apart, "ratio": apart / together}
    return table


def numbers(lengths=(512, 2048), steps: int = 48) -> dict:
    """Every way to hold K and V, steps in turn: CPU ms, KL against fp32 in nats a token, bytes reserved."""
    model, table = workshop("kvlab"), {}
    for length in lengths:
        ids = models.prompt(model, length - steps - 12 + models.STEPS)[0].tolist()
        made = {name: StaticGraphEngine(model, length, numbers=name) for name in NUMBERS}
        managers = {name: engine.manager() for name, engine in made.items()}
        last = {name: engine.feed(managers[name], ids)[-1] for name, engine in made.items()}
        times, errors = {name: [] for name in made}, {name: [] for name in made}
        for _ in range(steps):
            token = int(last["fp32"].argmax())
            for name, engine in made.items():
                start = time.process_time()
                last[name] = engine.feed(managers[name], [token])[0]
                times[name].append((time.process_time() - start) * 1e3)
            said = {name: torch.from_numpy(row).log_softmax(-1) for name, row in last.items()}
            for name, row in said.items():
                errors[name].append(float((said["fp32"].exp() * (said["fp32"] - row)).sum()))
        for name in made:
            table[f"{length} {name}"] = {
                "ms": statistics.median(times[name]),
                "kl": statistics.mean(errors[name]),
                "reserved_bytes": managers[name].reserved_bytes,
            }
    return table


def memory(length: int = 8192) -> dict:
    """Growth of the process when the buffers of one row are in full use, against the formula."""
    model = models.load({"suite": "wide", "device": "cpu"}, "kvlab")
    engine, process, table = StaticGraphEngine(model, length, form="single", chunk=1), psutil.Process(), {}
    engine.feed(engine.manager(), [2])  # what the engine allocates for itself is there from now on
    for policy, extra in (("shift", None), ("compromise", 0.5), ("double", None)):
        engine.policy, engine.extra = policy, extra
        gc.collect()
        before = process.memory_info().rss
        manager = engine.manager()
        manager.append(np.ones((*manager.past.shape[:2], manager.window, manager.head_dim), np.float32))
        if policy != "shift":
            engine.feed(manager, [2])  # the end is reached: the window goes to the front
        gc.collect()
        grown = process.memory_info().rss - before
        table[policy] = {"predicted": manager.reserved_bytes, "grown": grown}
        del manager
    return table


def drifting(steps=(1, 10, 100, 300, 700, 1500)) -> dict:
    """Error of int8 K and V over the steps, per cent of their size, mean over the layers: fixed scales and
    scales computed again at each step (real K and V of the workshop model on prose)."""
    model, tokenizer = kvlab.load()
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(STORIES.glob("a*.txt")))
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=steps[-1]).input_ids
    cache, scales = kvlab.KVCache(model), calibrate(model)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True)
    found: dict[str, list] = {}
    for index, layer in enumerate(cache.layers):
        for kind, rows in enumerate(layer.store.read(ids.device)):
            for way, errors in zip(("fixed", "anew"), drift(rows[0], scales[2 * index + kind]), strict=True):
                found.setdefault(f"{'KV'[kind]}, {way}", []).append([errors[step - 1] for step in steps])
    means = {name: [statistics.mean(column) for column in zip(*rows)] for name, rows in found.items()}
    return {name: dict(zip(map(str, steps), values)) for name, values in means.items()}


def requests(count: int = 64, context: int = 2048, prompt: int = 1024, steps: int = 64) -> dict:
    """Bytes reserved, and the part of them without a token, for requests of mixed lengths (one row each) and
    for 16 continuations of one prompt."""
    model, rng, forks = workshop("kvlab"), random.Random(0), 16
    shape = ModelShape.of(model)
    token = int(kv_bytes_per_token(shape, 32))
    lengths = [min(context, max(16, int(rng.lognormvariate(5.6, 0.8)))) for _ in range(count)]
    used, pool, held = sum(lengths) * token, BlockPool(), []
    one = replace(shape, layers=1)  # one layer of each; the others are alike
    layer = SimpleNamespace(order=0, evicts=False, shape=one, local=None)
    for tokens in lengths:
        held.append(Paged(pool=pool).start(layer))
        rows = torch.zeros(1, shape.kv_heads, tokens, shape.head_dim)
        held[-1].append(rows, rows)
    padded = KVManager(2 * shape.layers * shape.kv_heads, context, shape.head_dim).reserved_bytes
    reserved = {
        "growing": used,
        "static": count * context * token,
        "padded, double": count * padded,
        "paged": pool.used * pool.block_bytes * shape.layers,
    }
    found = {f"{count} requests, {name}": {"reserved": size, "used": used} for name, size in reserved.items()}
    ids = models.prompt(model, prompt + models.STEPS)
    for name, spec in (
        ("growing", "full"),
        ("static", f"static:length={prompt + steps}"),
        ("paged", "paged"),
    ):
        cache = kvlab.make_cache(model, spec)
        stepper = Stepper(model, cache)
        tokens = stepper.feed(ids, last=True).argmax(-1, keepdim=True).repeat(forks, 1)
        stepper.fork(torch.zeros(forks, dtype=torch.long))
        for step in range(steps):
            tokens = stepper.feed((tokens + torch.arange(forks)[:, None] + step) % 90, last=True)
            tokens = tokens.argmax(-1, keepdim=True)
        pages = cache.layers[0].store.pool if name == "paged" else None
        size = pages.used * pages.block_bytes if pages else cache.stats().device_bytes
        different = (prompt + forks * steps) * token  # every token once
        found[f"{forks} continuations, {name}"] = {"reserved": size, "used": different}
    return found


EXPERIMENTS = {
    "engines-512": lambda study: {"rows": engines(512)},
    "managing": lambda study: {"rows": managing()},
    "prompt": lambda study: {"rows": prompts()},
    "wide": lambda study: {"rows": wide()},
    "numbers": lambda study: {"rows": numbers()},
    "memory": lambda study: {"rows": memory()},
    "drift": lambda study: {"rows": drifting()},
    "requests": lambda study: {"rows": requests()},
    "engines-2048": lambda study: {"rows": engines(2048, repeats=2)},
}
