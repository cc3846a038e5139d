"""Decode steps of llama.cpp, of transformers' caches and of kvlab's engines, timed in turn in one process.

Every row (an engine with a cache) is made once and holds its cache for the whole measurement. In each of some
rounds every row has a turn with one thread, then every row one with two: a step that is not counted, which
brings its weights and its cache back, and `TIMED` that are. So a busy minute of the machine hits all rows. A
row that has taken `LONGEST` seconds with one number of threads has no more turns with it, after two.

    cpu_ms, wall_ms    median over the counted steps; _low and _high are their quartiles
    bytes              of K and V as the cache holds them, scales included
    gbps               (weights + bytes) / median wall time, 10^9 B/s: what a step must read
    fraction           gbps / the read bandwidth measured with as many threads, at the start
    off                largest difference of logits from those of DynamicCache, of the largest logit, after a
                       prompt of `PROMPT` tokens and a step: the row computes this model

A batch (`batch` rows) is padded on the left, row i by i times `PADDING` tokens; a model may be given another
number of `layers`, drawn at random beyond its own. Both are measured of the rows in `FEW` alone.

Caches are filled with random K and V, or in llama.cpp with short texts side by side: times do not depend on
what they hold. Tokens held grow from `context` less all the steps to `context`. All weights are fp32.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

import kvlab
from kvlab.arithmetic import read_bandwidth
from kvlab.attention import Recorded
from kvlab.engine.compiled import compiled, engine_of
from kvlab.models import ModelShape, source_of
from kvlab.visibility import CAUSAL, Visibility

from . import llama
from .baselines import QUANTIZED, baselines
from .models import tensor_bytes, weight_bytes

TIMED = 3  # steps of a turn that count
LONGEST = 10.0  # seconds
PROMPT = 24
REST = 0.005  # seconds between turns, in which threads of the last one fall asleep
OURS = ("full", "int8", "int4", "fp8", "h2o:budget=0.2")
PADDING = 9
FEW = ("hf-dynamic", "full", "int8")
ENGINES = ("eager", "compiled")


@dataclass
class Row:
    """engine: who computes. method: with which cache. make: a context -> something with `step()`,
    `threads(n)`, `bytes()`. logits: token ids -> those after the last one, which is fed as a step."""

    engine: str
    method: str
    make: Callable
    logits: Callable
    run: object = None
    cpu: dict[int, list[float]] = field(default_factory=dict)  # threads -> ms of the counted steps
    wall: dict[int, list[float]] = field(default_factory=dict)


class Step:
    """A cache of transformers or of kvlab, and a step of a model with it."""

    def __init__(self, model, cache, position: int, padding: torch.Tensor | None = None):
        self.model, self.cache, self.padding = model, cache, padding
        self.ids = torch.ones(1 if padding is None else len(padding), 1, dtype=torch.long)
        self.position = position

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        at = torch.full_like(self.ids, self.position)
        self.position += 1
        given = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        if self.padding is not None:
            self.padding = torch.cat([self.padding, self.ids], 1)
            at = self.padding.sum(-1, keepdim=True) - 1
            given["attention_mask"] = self.padding
        given["position_ids"] = at
        return self.model(self.ids, **given).logits

    def bytes(self) -> int:
        return self.cache.stats().device_bytes if hasattr(self.cache, "stats") else tensor_bytes(self.cache)

    def close(self) -> None:
        self.cache = None


class LlamaStep:
    """The same of llama.cpp."""

    def __init__(
        self, model: llama.Model, shape: ModelShape, kind: str, flash: bool, context: int, held: int
    ):
        self.context = llama.Context(model, kind, flash, context, max(tried()))
        self.context.fill(held)
        values = 2 * shape.layers * shape.kv_heads * shape.head_dim
        self.held, self.per_token = held, values * llama.BITS[kind] / 8

    def threads(self, count: int) -> None:
        self.context.threads(count)

    def step(self) -> None:
        self.context.feed([1])
        self.held += 1

    def bytes(self) -> int:
        return int(self.held * self.per_token)

    def close(self) -> None:
        self.context.close()


def tried() -> tuple[int, ...]:
    """Numbers of threads with which everything is timed."""
    from ..core.machine import cores

    return (1, 2) if cores() > 1 else (1,)


class Bench:
    """The model in all its forms: one set of weights for each engine, as if it ran alone."""

    def __init__(self, name: str | None, longest: int, batch: int = 1, layers: int | None = None):
        self.theirs = loaded(name, longest, layers)
        self.theirs.set_attn_implementation("sdpa")
        self.shape, self.batch = ModelShape.of(self.theirs), batch
        self.few = batch > 1 or layers is not None
        self.ours = {engine: kvlab.prepare(loaded(name, longest, layers)) for engine in ENGINES}
        compiled(self.ours["compiled"])
        self.llama = None
        if llama.there() and not self.few:
            with tempfile.TemporaryDirectory() as folder:
                llama.write(self.theirs, Path(folder) / "model.gguf")
                self.llama = llama.Model(Path(folder) / "model.gguf")  # the mapping outlives the name

    def rows(self, spare: int) -> list[Row]:
        """All rows; spare: tokens of a context that steps will bring."""
        found = []
        for kind in llama.TYPES if self.llama else ():
            for flash in (False, True) if kind[0] == "f" else (True,):  # quantized V needs it
                found.append(self._of_llama(kind, flash, spare))
        theirs, ours = (
            [name for name in names if name in FEW or not self.few] for names in (baselines(), OURS)
        )
        found += [self._of_theirs(kind, spare) for kind in theirs]
        return found + [self._of_ours(method, engine, spare) for method in ours for engine in ENGINES]

    def padding(self, held: int) -> torch.Tensor | None:
        """The mask `[batch, held]` of a batch whose rows hold so many tokens, padding included."""
        if self.batch == 1:
            return None
        return (torch.arange(held) >= PADDING * torch.arange(self.batch)[:, None]).long()

    def _of_llama(self, kind: str, flash: bool, spare: int) -> Row:
        def make(context: int) -> LlamaStep:
            return LlamaStep(self.llama, self.shape, kind, flash, context, context - spare)

        def logits(ids: torch.Tensor) -> torch.Tensor:
            context = llama.Context(self.llama, kind, flash, ids.shape[1], 1)
            context.feed(ids[0, :-1].tolist())
            context.feed(ids[0, -1:].tolist())
            found = context.logits(self.theirs.config.vocab_size)
            context.close()
            return found

        return Row("llama.cpp", f"{kind}, flash {'on' if flash else 'off'}", make, logits)

    def _of_theirs(self, kind: str, spare: int) -> Row:
        def make(context: int) -> Step:
            cache, held = self.their_cache(kind, context), context - spare
            size = (self.batch, self.shape.kv_heads, held, self.shape.head_dim)
            for layer in range(self.shape.layers):
                cache.update(torch.randn(size), torch.randn(size), layer)
            return Step(self.theirs, cache, held, self.padding(held))

        def logits(ids: torch.Tensor) -> torch.Tensor:
            return fed(self.theirs, self.their_cache(kind, 2 * PROMPT), ids)

        return Row("transformers", kind, make, logits)

    def _of_ours(self, method: str, engine: str, spare: int) -> Row:
        model = self.ours[engine]

        def make(context: int) -> Step:
            cache, held = kvlab.make_cache(model, method), context - spare
            padding = self.padding(held)
            fill(cache, self.shape, held, padding)
            return Step(model, cache, held, padding)

        def logits(ids: torch.Tensor) -> torch.Tensor:
            return fed(model, kvlab.make_cache(model, method), ids)

        return Row(f"kvlab, {engine}", method, make, logits)

    def their_cache(self, kind: str, tokens: int):
        from transformers import DynamicCache, QuantizedCache, StaticCache

        if kind == "hf-static":
            return StaticCache(config=self.theirs.config, max_cache_len=tokens)
        if kind in QUANTIZED:
            return QuantizedCache(config=self.theirs.config, **QUANTIZED[kind])
        return DynamicCache(config=self.theirs.config)

    def close(self) -> None:
        if self.llama:
            self.llama.close()


def loaded(name: str | None, longest: int, layers: int | None = None):
    """A model in fp32 that takes `longest` tokens: beyond what it was made for, only times count. layers:
    instead of its own number; those that it has not are drawn at random, the same every time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    how = {} if layers is None else {"num_hidden_layers": layers}
    model = AutoModelForCausalLM.from_pretrained(source_of(name), dtype=torch.float32, **how).eval()
    model.config.max_position_embeddings = max(longest, model.config.max_position_embeddings)
    return model


@torch.no_grad()
def fill(cache, shape: ModelShape, tokens: int, padding: torch.Tensor | None = None) -> None:
    """Fill an empty cache of kvlab's with random K and V, as if a prompt had been fed, padded as `padding`
    `[batch, tokens]` says."""
    batch = 1 if padding is None else len(padding)
    sees = CAUSAL if padding is None else Visibility(padding.bool())
    for layer in cache.attending:
        query = torch.randn(batch, shape.heads, tokens, shape.head_dim)
        keys, values = torch.randn(2, batch, shape.kv_heads, tokens, shape.head_dim)
        received = torch.rand(batch, shape.kv_heads, tokens) if layer.observes else None
        layer.fill(Recorded(query, keys, values, sees, shape.head_dim**-0.5), received)


@torch.no_grad()
def fed(model, cache, ids: torch.Tensor) -> torch.Tensor:
    """Logits `[vocabulary]` after ids `[1, tokens]`, the last of which is a step."""
    model(ids[:, :-1], past_key_values=cache, use_cache=True)
    return model(ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]


def measure(
    name: str | None, context: int, rounds: int, at: Callable, batch: int = 1, layers: int | None = None
) -> dict:
    """What the cell of a model at a context holds. at(what, part): how far it is."""
    before, threads = torch.get_num_threads(), tried()
    spare = rounds * (1 + TIMED) * len(threads)
    bench = Bench(name, context, batch, layers)
    try:
        bandwidth = {}
        for count in threads:
            torch.set_num_threads(count)
            bandwidth[count] = read_bandwidth(0.5)
        rows = bench.rows(spare)
        ids = torch.randint(
            0, bench.shape.vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(0)
        )
        right = fed(bench.theirs, bench.their_cache("hf-dynamic", 0), ids)
        off = [float((row.logits(ids) - right).abs().max() / right.abs().max()) for row in rows]
        for index, row in enumerate(rows):
            at(f"{row.engine}: {row.method}, filled", 0.2 * index / len(rows))
            torch.set_num_threads(max(threads))
            row.run = row.make(context)
        for number in range(rounds):
            for count in threads:
                for row in rows:
                    at(f"{row.engine}: {row.method}, threads: {count}", 0.2 + 0.8 * number / rounds)
                    if number < 2 or sum(row.wall[count]) < 1e3 * LONGEST:
                        turn(row, count)
        weights = weight_bytes(bench.theirs)
        told = [
            told_of(row, count, context, one, weights, bandwidth[count])
            for count in threads
            for row, one in zip(rows, off, strict=True)
        ]
        engine = engine_of(bench.ours["compiled"])
        for row in rows:
            row.run.close()
    finally:
        torch.set_num_threads(before)
        bench.close()
        gc.collect()
    about = {
        "simd": torch.backends.cpu.get_cpu_capability(),
        "llama.cpp": llama.features() if bench.llama else None,
        "weight_bytes": weights,
        "compiled": engine,
        "batch": batch,
        "layers": bench.shape.layers,
    }
    return {"rows": told, "about": about}


def turn(row: Row, threads: int) -> None:
    """A step that does not count and some that do."""
    row.run.threads(threads)
    time.sleep(REST)
    row.run.step()
    for _ in range(TIMED):
        wall, cpu = time.perf_counter(), time.process_time()
        row.run.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        row.cpu.setdefault(threads, []).append(1e3 * cpu)
        row.wall.setdefault(threads, []).append(1e3 * wall)


def told_of(row: Row, threads: int, context: int, off: float, weights: int, bandwidth: float) -> dict:
    """A row of the cell."""
    held = row.run.bytes()
    found = {"engine": row.engine, "method": row.method, "context": context, "threads": threads}
    for name, times in (("cpu_ms", row.cpu[threads]), ("wall_ms", row.wall[threads])):
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        found |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    gbps = (weights + held) / found["wall_ms"] / 1e6
    found |= {
        "steps": len(row.wall[threads]),
        "bytes": held,
        "gbps": gbps,
        "fraction": 1e9 * gbps / bandwidth,
    }
    return found | {"bandwidth_gbps": bandwidth / 1e9, "off": off}
