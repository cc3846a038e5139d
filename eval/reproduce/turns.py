"""Steps and prompts of llama.cpp, of transformers' caches and of kvlab's engines, in turn in one process.

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

Weights are in fp32, or as narrow as `weights` says: then kvlab's compiled engine with the methods `NARROW` is
beside llama.cpp with weights as narrow (`llama.OF_WEIGHTS`), where it can hold the model so.

Caches are filled with random K and V, or in llama.cpp with short texts side by side: times do not depend on
what they hold. Tokens held grow from `context` less all the steps to `context`. A turn with a whole prompt
feeds it once to an empty cache, in three rounds; the memory of a cache that is reserved for all tokens at
once, as llama.cpp's, is asked for before the clock starts.
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
from kvlab.faster import compiled, engine_of
from kvlab.measure.host import cores
from kvlab.models import ModelShape, source_of
from kvlab.visibility import CAUSAL

from ..speed.baselines import baselines, cache_of
from ..speed.models import tensor_bytes, weight_bytes
from . import llama

TIMED = 3  # steps of a turn that count
LONGEST, LONGEST_PROMPTS = 10.0, 60.0  # seconds
PROMPT = 24
PROMPT_ROUNDS = 3
REST = 0.005  # seconds between turns, in which threads of the last one fall asleep
OURS = ("full", "int8", "int4", "fp8", "h2o:budget=0.2")
NARROW = ("full", "int8", "int4")
FED = ("full", "int8", "h2o:budget=0.2", "snapkv:budget=0.2")  # a whole prompt
LONG, FED_LONG = 4096, ("full", "h2o:budget=0.2")
ENGINES = ("eager", "compiled")


@dataclass
class Row:
    """engine: who computes. method: with which cache. empty: tokens -> a run with an empty cache for so many.
    weights: how they are held, and their bytes in a step."""

    engine: str
    method: str
    empty: Callable
    weights: tuple[str, int]
    run: Run | llama.Context | None = None
    cpu: dict[int, list[float]] = field(default_factory=dict)  # threads -> ms of what counts
    wall: dict[int, list[float]] = field(default_factory=dict)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """After ids `[1, tokens]`, the last of which is fed as a step: `[vocabulary]`."""
        run = self.empty(2 * ids.shape[1])
        run.threads(1)
        run.feed(ids[:, :-1])
        found = run.feed(ids[:, -1:])
        run.close()
        return found

    def timed(self, threads: int, call: Callable) -> None:
        """What the run does, by the clock."""
        wall, cpu = time.perf_counter(), time.process_time()
        call()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        self.cpu.setdefault(threads, []).append(1e3 * cpu)
        self.wall.setdefault(threads, []).append(1e3 * wall)

    def stored(self, threads: int, context: int, off: float, bandwidth: float) -> dict:
        """The row as it is stored."""
        found = {"engine": self.engine, "method": self.method, "context": context, "threads": threads}
        found["weights"], found["weight_bytes"] = self.weights
        for name, times in (("cpu_ms", self.cpu[threads]), ("wall_ms", self.wall[threads])):
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
            found |= {name: middle, f"{name}_low": low, f"{name}_high": high}
        found |= {"steps": len(self.wall[threads]), "bytes": self.run.bytes(), "off": off}
        return found | {"bandwidth_gbps": bandwidth / 1e9}


class Run:
    """A cache of transformers or of kvlab, and passes of a model with it."""

    def __init__(self, model, cache):
        self.model, self.cache, self.position = model, cache, 0

    def threads(self, count: int) -> None:
        torch.set_num_threads(count)

    @torch.no_grad()
    def fill(self, tokens: int, shape: ModelShape) -> None:
        """Fill its empty cache with random K and V, as if a prompt of so many tokens had been fed."""
        for index, layer in enumerate(getattr(self.cache, "attending", range(shape.layers))):
            keys, values = torch.randn(2, 1, shape.kv_heads, tokens, shape.head_dim)
            if isinstance(layer, int):
                self.cache.update(keys, values, index)
                continue
            query = torch.randn(1, shape.heads, tokens, shape.head_dim)
            received = torch.rand(1, shape.kv_heads, tokens) if layer.observes else None
            layer.fill(Recorded(query, keys, values, CAUSAL, shape.head_dim**-0.5), received)
        self.position = tokens

    @torch.no_grad()
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens `[1, tokens]` -> logits `[vocabulary]` after the last one."""
        given = {"past_key_values": self.cache, "use_cache": True, "logits_to_keep": 1}
        if ids.shape[1] == 1:
            given["position_ids"] = torch.full_like(ids, self.position)
        self.position += ids.shape[1]
        return self.model(ids, **given).logits[0, -1]

    def step(self) -> None:
        self.feed(torch.ones(1, 1, dtype=torch.long))

    def bytes(self) -> int:
        return self.cache.stats().device_bytes if hasattr(self.cache, "stats") else tensor_bytes(self.cache)

    def close(self) -> None:
        self.cache = None


def thread_counts() -> tuple[int, ...]:
    """Numbers of threads with which everything is timed."""
    return (1, 2) if cores() > 1 else (1,)


class Bench:
    """The model in all its forms: one set of weights for each engine, as if it ran alone."""

    def __init__(self, name: str | None, longest: int, weights: str = "fp32"):
        self.theirs = loaded(name, longest)
        self.theirs.set_attn_implementation("sdpa")
        self.shape, self.weights, self.narrow = ModelShape.of(self.theirs), weights, weights != "fp32"
        engines = ("compiled",) if self.narrow else ENGINES
        self.ours = {engine: kvlab.prepare(loaded(name, longest)) for engine in engines}
        compiled(self.ours["compiled"], weights)
        self.llama, kind = None, llama.OF_WEIGHTS[weights]
        if llama.there() and llama.holds(self.theirs, kind):
            with tempfile.TemporaryDirectory() as folder:
                self.llama_weights = kind, llama.write(self.theirs, Path(folder) / "model.gguf", kind)
                self.llama = llama.Model(Path(folder) / "model.gguf")  # the mapping outlives the name

    def rows(self) -> list[Row]:
        """All rows for steps."""
        found = []
        for kind in llama.TYPES if self.llama else ():
            for flash in (False, True) if kind[0] == "f" else (True,):  # quantized V needs it
                found.append(self.of_llama(kind, flash))
        theirs, ours = ((), NARROW) if self.narrow else (baselines(), OURS)
        found += [self.of_theirs(kind) for kind in theirs]
        return found + [self.of_ours(method, engine) for method in ours for engine in self.ours]

    def rows_of_prompt(self, tokens: int) -> list[Row]:
        """The rows for a prompt of so many tokens; llama.cpp's f32 with flash attention and without."""
        long = tokens > LONG
        found = [self.of_llama("f32", flash) for flash in (False, True) if self.llama and not long]
        found.append(self.of_theirs("hf-dynamic"))
        return found + [self.of_ours(method, "compiled") for method in (FED_LONG if long else FED)]

    def of_llama(self, kind: str, flash: bool) -> Row:
        most = max(thread_counts())
        empty = lambda tokens: llama.Context(self.llama, self.shape, kind, flash, tokens, most)
        method = f"{kind}, flash {'on' if flash else 'off'}"
        return Row(self.named("llama.cpp", self.llama_weights[0]), method, empty, self.llama_weights)

    def of_theirs(self, kind: str) -> Row:
        empty = lambda tokens: Run(self.theirs, cache_of(kind, self.theirs.config, tokens))
        return Row("transformers", kind, empty, ("fp32", weight_bytes(self.theirs)))

    def of_ours(self, method: str, engine: str) -> Row:
        model = self.ours[engine]
        empty = lambda tokens: Run(model, kvlab.make_cache(model, method))
        engine = self.named(f"kvlab, {engine}", self.weights)
        return Row(engine, method, empty, (self.weights, weight_bytes(model)))

    def named(self, engine: str, weights: str) -> str:
        """An engine and, where they are narrow, its weights."""
        return f"{engine}, {weights} weights" if self.narrow else engine

    def ids(self, tokens: int) -> torch.Tensor:
        """A prompt `[1, tokens]`, the same every time."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, self.shape.vocabulary, (1, tokens), generator=generator)

    def close(self) -> None:
        if self.llama:
            self.llama.close()


def loaded(name: str | None, longest: int):
    """A model in fp32 that takes `longest` tokens: beyond what it was made for, only times count."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source_of(name), dtype=torch.float32).eval()
    model.config.max_position_embeddings = max(longest, model.config.max_position_embeddings)
    return model


def measure(
    name: str | None, context: int, rounds: int, at: Callable, weights: str = "fp32", prompt: bool = False
) -> dict:
    """What the cell of a model at a context holds. at(what, part): how far it is."""
    before, threads = torch.get_num_threads(), thread_counts()
    bench, read = Bench(name, context, weights), {}
    try:
        for count in threads:
            torch.set_num_threads(count)
            read[count] = read_bandwidth(0.5)
        rows = bench.rows_of_prompt(context) if prompt else bench.rows()
        ids = bench.ids(PROMPT)
        right = bench.of_theirs("hf-dynamic").logits(ids)
        off = [float((row.logits(ids) - right).abs().max() / right.abs().max()) for row in rows]
        if prompt:
            turn, rounds, longest = lambda row, count: fed(row, count, whole), PROMPT_ROUNDS, LONGEST_PROMPTS
            whole = bench.ids(context)
        else:
            turn, longest = stepped, LONGEST
            for index, row in enumerate(rows):
                at(f"{row.engine}: {row.method}, filled", 0.2 * index / len(rows))
                torch.set_num_threads(max(threads))
                row.run = row.empty(context)
                row.run.fill(context - rounds * (1 + TIMED) * len(threads), bench.shape)
        for number in range(rounds):
            for count in threads:
                for row in rows:
                    at(f"{row.engine}: {row.method}, threads: {count}", 0.2 + 0.8 * number / rounds)
                    if number < 2 or sum(row.wall[count]) < 1e3 * longest:
                        turn(row, count)
        found = [
            row.stored(count, context, one, read[count])
            for count in threads
            for row, one in zip(rows, off, strict=True)
        ]
        for row in found if not prompt else ():
            row["gbps"] = (row["weight_bytes"] + row["bytes"]) / row["wall_ms"] / 1e6
            row["fraction"] = row["gbps"] / row["bandwidth_gbps"]
        about = {
            "simd": torch.backends.cpu.get_cpu_capability(),
            "llama.cpp": llama.features() if bench.llama else None,
            "compiled": engine_of(bench.ours["compiled"]),
            "batch": 1,
            "layers": bench.shape.layers,
        }
        for row in rows:
            row.run.close()
    finally:
        torch.set_num_threads(before)
        bench.close()
        gc.collect()
    return {"rows": found, "about": about}


def stepped(row: Row, threads: int) -> None:
    """A step that does not count and some that do."""
    row.run.threads(threads)
    time.sleep(REST)
    row.run.step()
    for _ in range(TIMED):
        row.timed(threads, row.run.step)


def fed(row: Row, threads: int, ids: torch.Tensor) -> None:
    """Feed the prompt once; the row keeps the last run."""
    if row.run is not None:
        row.run.close()
    row.run = row.empty(ids.shape[1])
    row.run.threads(threads)
    time.sleep(REST)
    row.timed(threads, lambda: row.run.feed(ids))
