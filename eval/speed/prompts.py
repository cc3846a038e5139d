"""The time of a whole prompt in llama.cpp, transformers' DynamicCache and kvlab, in turn in one process.

In each of three rounds every row feeds the prompt to an empty cache once with one thread, then every row once
with two. What a row prepares at its first use it has prepared for a short prompt. A row that has taken
`LONGEST` seconds with one number of threads is not fed again with it, after two. The memory of a cache that
is reserved for all tokens at once, as llama.cpp's, is asked for before the clock starts.

    cpu_ms, wall_ms    median over the rounds; _low and _high are quartiles
    bytes              of K and V after the prompt, scales included
    off                see `steps.py`
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from .steps import REST, Bench, Row, about_of, bandwidths, far_off, ids_of, in_turns, told_of, tried

OURS = ("full", "int8", "h2o:budget=0.2", "snapkv:budget=0.2")
ROUNDS = 3
LONGEST = 60.0  # seconds
LONG, FEW = 4096, ("full", "h2o:budget=0.2")


def measure(name: str | None, tokens: int, at: Callable) -> dict:
    """What the cell of a model and a prompt of so many tokens holds. at(what, part): how far it is."""
    before = torch.get_num_threads()
    bench = Bench(name, tokens)
    try:
        read, rows, ids = bandwidths(), rows_of(bench, tokens), ids_of(bench, tokens)
        off = far_off(bench, rows)
        in_turns(rows, tried(), ROUNDS, LONGEST, lambda row, count: turn(row, ids, count), at)
        told = [
            told_of(row, count, tokens, one) | {"bandwidth_gbps": read[count] / 1e9}
            for count in tried()
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


def rows_of(bench: Bench, tokens: int) -> list[Row]:
    """The rows for a prompt of so many tokens; llama.cpp's f32 with flash attention and without."""
    long = tokens > LONG
    found = [bench.of_llama("f32", flash) for flash in (False, True) if bench.llama and not long]
    found.append(bench.of_theirs("hf-dynamic"))
    return found + [bench.of_ours(method, "compiled") for method in (FEW if long else OURS)]


def turn(row: Row, ids: torch.Tensor, threads: int) -> None:
    """Feed the prompt once; the row keeps the last run."""
    if row.run is not None:
        row.run.close()
    row.run = row.empty(ids.shape[1])
    row.run.threads(threads)
    time.sleep(REST)
    wall, cpu = time.perf_counter(), time.process_time()
    row.run.feed(ids)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    row.cpu.setdefault(threads, []).append(1e3 * cpu)
    row.wall.setdefault(threads, []).append(1e3 * wall)
