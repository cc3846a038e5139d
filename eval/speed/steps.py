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

Weights are in fp32, or as narrow as `weights` says: then kvlab's compiled engine with the methods `NARROW` is
beside llama.cpp with weights as narrow (`llama.OF_WEIGHTS`), where it can hold the model so.

Caches are filled with random K and V, or in llama.cpp with short texts side by side: times do not depend on
what they hold. Tokens held grow from `context` less all the steps to `context`.
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
from kvlab.fast.compiled import compiled, engine_of
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
NARROW = ("full", "int8", "int4")
PADDING = 9
FEW = ("hf-dynamic", "full", "int8")
ENGINES = ("eager", "compiled")


@dataclass
class Row:
    """engine: who computes. method: with which cache. empty: tokens -> a run with an empty cache for so many,
    with `feed(ids)`, `step()`, `threads(n)`, `bytes()`, `close()`. fill: a run, tokens -> fills its cache.
    weights: how they are held, and their bytes in a step."""

    engine: str
    method: str
    empty: Callable
    fill: Callable
    weights: tuple[str, int]
    run: object = None
    cpu: dict[int, list[float]] = field(default_factory=dict)  # threads -> ms of the counted steps
    wall: dict[int, list[float]] = field(default_factory=dict)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """After ids `[1, tokens]`, the last of which is fed as a step: `[vocabulary]`."""
        run = self.empty(2 * ids.shape[1])
        run.threads(1)
        run.feed(ids[:, :-1])
        found = run.feed(ids[:, -1:])
        run.close()
        return found


class Step:
    """A cache of transformers or of kvlab, and a step of a model with it."""

    def __init__(self, model, cache, rows: int = 1):
        self.model, self.cache, self.padding = model, cache, None
        self.ids = torch.ones(rows, 1, dtype=torch.long)
        self.position = 0

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def holds(self, tokens: int, padding: torch.Tensor | None) -> None:
        """Its cache has been filled with so many tokens, padded as `padding` `[rows, tokens]` says."""
        self.position, self.padding = tokens, padding

    @torch.no_grad()
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens `[1, tokens]` -> logits `[vocabulary]` after the last one."""
        found = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.position += ids.shape[1]
        return found.logits[0, -1]

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

    def __init__(self, model: llama.Model, shape: ModelShape, kind: str, flash: bool, tokens: int):
        self.context = llama.Context(model, kind, flash, tokens, max(tried()))
        values = 2 * shape.layers * shape.kv_heads * shape.head_dim
        self.held, self.per_token, self.vocabulary = 0, values * llama.BITS[kind] / 8, shape.vocabulary

    def holds(self, tokens: int) -> None:
        """Fill its empty cache with so many tokens."""
        self.context.fill(tokens)
        self.held = tokens

    def threads(self, count: int) -> None:
        self.context.threads(count)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """As `Step.feed`."""
        self.context.feed(ids[0].tolist())
        self.held += ids.shape[1]
        return self.context.logits(self.vocabulary)

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

    def __init__(
        self, name: str | None, longest: int, batch: int = 1, layers: int | None = None, weights: str = "fp32"
    ):
        self.theirs = loaded(name, longest, layers)
        self.theirs.set_attn_implementation("sdpa")
        self.shape, self.batch, self.weights = ModelShape.of(self.theirs), batch, weights
        self.few, self.narrow = batch > 1 or layers is not None, weights != "fp32"
        engines = ("compiled",) if self.narrow else ENGINES
        self.ours = {engine: kvlab.prepare(loaded(name, longest, layers)) for engine in engines}
        compiled(self.ours["compiled"], weights)
        self.llama, kind = None, llama.OF_WEIGHTS[weights]
        if llama.there() and not self.few and llama.holds(self.theirs, kind):
            with tempfile.TemporaryDirectory() as folder:
                self.llama_weights = kind, llama.write(self.theirs, Path(folder) / "model.gguf", kind)
                self.llama = llama.Model(Path(folder) / "model.gguf")  # the mapping outlives the name

    def rows(self) -> list[Row]:
        """All rows."""
        found = []
        for kind in llama.TYPES if self.llama else ():
            for flash in (False, True) if kind[0] == "f" else (True,):  # quantized V needs it
                found.append(self.of_llama(kind, flash))
        both = ((), NARROW) if self.narrow else (baselines(), OURS)
        theirs, ours = ([name for name in names if name in FEW or not self.few] for names in both)
        found += [self.of_theirs(kind) for kind in theirs]
        return found + [self.of_ours(method, engine) for method in ours for engine in self.ours]

    def padding(self, held: int) -> torch.Tensor | None:
        """The mask `[batch, held]` of a batch whose rows hold so many tokens, padding included."""
        if self.batch == 1:
            return None
        return (torch.arange(held) >= PADDING * torch.arange(self.batch)[:, None]).long()

    def of_llama(self, kind: str, flash: bool) -> Row:
        def empty(tokens: int) -> LlamaStep:
            return LlamaStep(self.llama, self.shape, kind, flash, tokens)

        method = f"{kind}, flash {'on' if flash else 'off'}"
        return Row(self.named("llama.cpp", self.llama_weights[0]), method, empty, LlamaStep.holds,
                   self.llama_weights)  # fmt: skip

    def of_theirs(self, kind: str) -> Row:
        def empty(tokens: int) -> Step:
            return Step(self.theirs, self.their_cache(kind, tokens), self.batch)

        def fill(run: Step, held: int) -> None:
            size = (self.batch, self.shape.kv_heads, held, self.shape.head_dim)
            for layer in range(self.shape.layers):
                run.cache.update(torch.randn(size), torch.randn(size), layer)
            run.holds(held, self.padding(held))

        return Row("transformers", kind, empty, fill, ("fp32", weight_bytes(self.theirs)))

    def of_ours(self, method: str, engine: str) -> Row:
        model = self.ours[engine]

        def empty(tokens: int) -> Step:
            return Step(model, kvlab.make_cache(model, method), self.batch)

        def fill(run: Step, held: int) -> None:
            padding = self.padding(held)
            fill_cache(run.cache, self.shape, held, padding)
            run.holds(held, padding)

        engine = self.named(f"kvlab, {engine}", self.weights)
        return Row(engine, method, empty, fill, (self.weights, weight_bytes(model)))

    def named(self, engine: str, weights: str) -> str:
        """An engine and, where they are narrow, its weights."""
        return f"{engine}, {weights} weights" if self.narrow else engine

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
def fill_cache(cache, shape: ModelShape, tokens: int, padding: torch.Tensor | None = None) -> None:
    """Fill an empty cache of kvlab's with random K and V, as if a prompt had been fed, padded as `padding`
    `[batch, tokens]` says."""
    batch = 1 if padding is None else len(padding)
    sees = CAUSAL if padding is None else Visibility(padding.bool())
    for layer in cache.attending:
        query = torch.randn(batch, shape.heads, tokens, shape.head_dim)
        keys, values = torch.randn(2, batch, shape.kv_heads, tokens, shape.head_dim)
        received = torch.rand(batch, shape.kv_heads, tokens) if layer.observes else None
        layer.fill(Recorded(query, keys, values, sees, shape.head_dim**-0.5), received)


def ids_of(bench: Bench, tokens: int) -> torch.Tensor:
    """A prompt `[1, tokens]`, the same every time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, bench.shape.vocabulary, (1, tokens), generator=generator)


def far_off(bench: Bench, rows: list[Row]) -> list[float]:
    """How far each row's logits are from DynamicCache's, see `off` above."""
    ids = ids_of(bench, PROMPT)
    right = bench.of_theirs("hf-dynamic").logits(ids)
    return [float((row.logits(ids) - right).abs().max() / right.abs().max()) for row in rows]


def bandwidths() -> dict[int, float]:
    """Bytes per second read from memory, by the number of threads; torch is left with the last."""
    found = {}
    for count in tried():
        torch.set_num_threads(count)
        found[count] = read_bandwidth(0.5)
    return found


def measure(
    name: str | None, context: int, rounds: int, at: Callable, batch: int = 1, layers: int | None = None,
    weights: str = "fp32",
) -> dict:  # fmt: skip
    """What the cell of a model at a context holds. at(what, part): how far it is."""
    before, threads = torch.get_num_threads(), tried()
    spare = rounds * (1 + TIMED) * len(threads)
    bench = Bench(name, context, batch, layers, weights)
    try:
        read, rows = bandwidths(), bench.rows()
        off = far_off(bench, rows)
        for index, row in enumerate(rows):
            at(f"{row.engine}: {row.method}, filled", 0.2 * index / len(rows))
            torch.set_num_threads(max(threads))
            row.run = row.empty(context)
            row.fill(row.run, context - spare)
        in_turns(rows, threads, rounds, LONGEST, turn, lambda what, done: at(what, 0.2 + 0.8 * done))
        told = [
            told_of(row, count, context, one) | per_second(row, count, read[count])
            for count in threads
            for row, one in zip(rows, off, strict=True)
        ]
        about = about_of(bench)
        for row in rows:
            row.run.close()
    finally:
        torch.set_num_threads(before)
        bench.close()
        gc.collect()
    return {"rows": told, "about": about}


def in_turns(rows: list[Row], threads, rounds: int, longest: float, turn: Callable, at: Callable) -> None:
    """Every row has a turn with each number of threads, so many times over; a row that has taken `longest`
    seconds with one number has no more with it, after two. turn: row, threads. at: what, the part done."""
    for number in range(rounds):
        for count in threads:
            for row in rows:
                at(f"{row.engine}: {row.method}, threads: {count}", number / rounds)
                if number < 2 or sum(row.wall[count]) < 1e3 * longest:
                    turn(row, count)


def about_of(bench: Bench) -> dict:
    """What a cell's rows stand on."""
    return {
        "simd": torch.backends.cpu.get_cpu_capability(),
        "llama.cpp": llama.features() if bench.llama else None,
        "compiled": engine_of(bench.ours["compiled"]),
        "batch": bench.batch,
        "layers": bench.shape.layers,
    }


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


def told_of(row: Row, threads: int, context: int, off: float) -> dict:
    """A row of the cell: its times, and how right it is."""
    found = {"engine": row.engine, "method": row.method, "context": context, "threads": threads}
    found["weights"], found["weight_bytes"] = row.weights
    for name, times in (("cpu_ms", row.cpu[threads]), ("wall_ms", row.wall[threads])):
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        found |= {name: middle, f"{name}_low": low, f"{name}_high": high}
    return found | {"steps": len(row.wall[threads]), "bytes": row.run.bytes(), "off": off}


def per_second(row: Row, threads: int, bandwidth: float) -> dict:
    """What a step reads per second, of this bandwidth."""
    gbps = (row.weights[1] + row.run.bytes()) / statistics.median(row.wall[threads]) / 1e6
    return {"gbps": gbps, "fraction": 1e9 * gbps / bandwidth, "bandwidth_gbps": bandwidth / 1e9}
