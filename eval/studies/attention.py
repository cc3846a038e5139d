"""Decode attention alone: packed K and V read by the kernels, beside what there is without them.

    fp32-sdpa      torch's scaled_dot_product_attention over fp32 K and V: the base of `speedup`
    FORMAT         the kernel that reads the format's bytes (on a CPU: kvlab/kernels/cpu.py)
    FORMAT-decode  all of K and V turned back into fp32, then attention: what a store without kernels does

One query per row, batch 1, 8 KV heads of 128 dimensions, one thread. `ms` is the median of repeats that are
interleaved over the kernels, and after them over what decodes first: in between, the memory that decoding
takes and gives back made a kernel that came next up to twice as slow. `bytes` are those of K and V as stored,
scales included; `bits` is the true cost per value; the fraction is bytes / time over the read bandwidth
measured in the same run.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab import kernels
from kvlab.arithmetic import read_bandwidth
from kvlab.store import Float8, Growing, Int
from kvlab.store.growing import GrowingState

HEADS, HEAD_DIM = 8, 128
SLOW = 3  # repeats of what decodes first, which is slow and steady
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
def measure(tokens: int, repeats: int) -> list[dict]:
    """The rows of attention.json for one length."""
    bandwidth, made = read_bandwidth(1.0), contestants(tokens)
    times: dict[str, list[float]] = {name: [] for name in made}
    slow = [name for name in made if name.endswith("-decode")]
    for turns, names in ((repeats, [name for name in made if name not in slow]), (min(repeats, SLOW), slow)):
        for turn in range(turns + 1):
            for name in names:
                started = time.perf_counter()
                made[name][0]()
                if turn:  # the first one compiles and warms up
                    times[name].append((time.perf_counter() - started) * 1e3)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    return [
        {
            "kernel": name,
            "bits": bits,
            "tokens": tokens,
            "ms": medians[name],
            "bytes": size,
            "fraction_of_bandwidth": size / (medians[name] / 1e3) / bandwidth,
            "speedup": medians["fp32-sdpa"] / medians[name],
            "ms_min": min(times[name]),
            "ms_max": max(times[name]),
            "bandwidth_gbps": bandwidth / 1e9,
        }
        for name, (_, size, bits) in made.items()
    ]
