"""Decode attention alone: packed K and V read by the kernels, beside what there is without them.

`python -m eval speed --suite attention --out DIR` prints a table and writes DIR/attention.json:

    [{kernel, bits, tokens, ms, bytes, fraction_of_bandwidth, speedup}]

    fp32-sdpa      torch's scaled_dot_product_attention over fp32 K and V: the base of `speedup`
    FORMAT         the kernel that reads the format's bytes (on a CPU: kvlab/kernels/cpu.py)
    FORMAT-decode  all of K and V turned back into fp32, then attention: what a store without kernels does

One query per row, batch 1, 8 KV heads of 128 dimensions, one thread. `ms` is the median of repeats that are
interleaved over the kernels; `bytes` are those of K and V as stored, scales included; `bits` is the true
cost per value; the fraction is bytes / time over the read bandwidth measured in the same run.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from kvlab import kernels
from kvlab.arithmetic import read_bandwidth
from kvlab.store import Float8, Growing, Int
from kvlab.store.growing import GrowingState

from .machine import machine
from .results import write_json

HEADS, HEAD_DIM, TOKENS = 8, 128, (2048, 8192, 32768)
REPEATS = 15
FORMATS = {
    "int8": lambda: Int(8),
    "int8-g32": lambda: Int(8, 32),
    "int4": lambda: Int(4),
    "int4-g32": lambda: Int(4, 32),
    "fp8-e4m3": lambda: Float8("e4m3"),
    "fp8-e5m2": lambda: Float8("e5m2"),
}


def contestants(tokens: int) -> dict[str, tuple]:
    """{name: (call, bytes of K and V, bits per value)} for one length; all hold the same K and V."""
    torch.manual_seed(tokens)
    query = torch.randn(1, HEADS, 1, HEAD_DIM)
    keys, values = torch.randn(2, 1, HEADS, tokens, HEAD_DIM)
    scaling = HEAD_DIM**-0.5
    made = {
        "fp32-sdpa": (
            lambda: scaled_dot_product_attention(query, keys, values, scale=scaling),
            keys.nbytes + values.nbytes,
            32.0,
        )
    }
    for name, form in FORMATS.items():
        store = GrowingState(Growing(form()))
        store.append(keys, values)
        size = sum(part.nbytes for part in (*store.keys, *store.values))
        bits = 8 * size / (2 * keys.numel())
        if kernels.fits(store, query):
            made[name] = (lambda s=store: kernels.attend_packed(query, s, scaling), size, bits)
        made[f"{name}-decode"] = (lambda s=store: kernels.reference(query, s, scaling), size, bits)
    return made


@torch.inference_mode()
def measure(lengths=TOKENS, repeats: int = REPEATS) -> list[dict]:
    """The rows of attention.json, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        bandwidth, rows = read_bandwidth(1.0), []
        for tokens in lengths:
            made = contestants(tokens)
            times: dict[str, list[float]] = {name: [] for name in made}
            for repeat in range(repeats + 1):
                for name, (call, _, _) in made.items():
                    if repeat > 3 and name.endswith("-decode"):
                        continue  # slow and steady: three are enough
                    started = time.perf_counter()
                    call()
                    if repeat:  # the first one compiles and warms up
                        times[name].append((time.perf_counter() - started) * 1e3)
            base = statistics.median(times["fp32-sdpa"])
            for name, (_, size, bits) in made.items():
                ms = statistics.median(times[name])
                rows.append(
                    {
                        "kernel": name,
                        "bits": bits,
                        "tokens": tokens,
                        "ms": ms,
                        "bytes": size,
                        "fraction_of_bandwidth": size / (ms / 1e3) / bandwidth,
                        "speedup": base / ms,
                        "ms_min": min(times[name]),
                        "ms_max": max(times[name]),
                        "bandwidth_gbps": bandwidth / 1e9,
                        "machine": machine("cpu", 1),
                    }
                )
        return rows
    finally:
        torch.set_num_threads(threads)


def table(rows: list[dict]) -> Table:
    """The rows, for the terminal."""
    title = f"decode attention, {HEADS} KV heads of {HEAD_DIM}, one thread"
    made = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for column in ("tokens", "kernel", "bits", "ms", "min–max", "MB", "of bandwidth", "speed-up"):
        made.add_column(column, justify="left" if column == "kernel" else "right")
    for row in rows:
        made.add_row(
            f"{row['tokens']:,}", row["kernel"], f"{row['bits']:.2f}", f"{row['ms']:.2f}",
            f"{row['ms_min']:.2f}–{row['ms_max']:.2f}", f"{row['bytes'] / 1e6:.1f}",
            f"{row['fraction_of_bandwidth']:.0%}", f"{row['speedup']:.1f}×",
        )  # fmt: skip
    return made


def run(out: Path, limit: int | None = None) -> None:
    """Measure, print and write DIR/attention.json; `limit`: the shortest length and few repeats only."""
    rows = measure(TOKENS[:1], 3) if limit else measure()
    write_json(out / "attention.json", rows)
    console = Console()
    console.print(table(rows))
    first = rows[0]
    console.print(
        f"{first['machine']['cpu']}, {first['machine']['cores']} cores; "
        f"read bandwidth {first['bandwidth_gbps']:.1f} GB/s on one thread; {out / 'attention.json'}"
    )
