"""Decode attention alone: K and V read by the kernels in stored form, beside the alternatives without them.

    fp32-sdpa      torch's scaled_dot_product_attention over fp32 K and V: the base of `speedup`
    FORMAT         the kernel that reads the format's bytes (on a CPU: kvlab/fast/cpu.py, wide.py)
    FORMAT-decode  all of K and V turned back into fp32, then attention: what a store without kernels does

One query per row, batch 1, one thread, for the heads of `SHAPES`. All kernels have a turn, then all again;
before every turn 256 MiB of other memory are read, so that nothing of K and V is in the processor's cache,
and their time gives the memory's speed at that moment. Methods that decode first have their turns afterwards:
the memory that they take and return made the next kernel up to twice as slow. `ms` is a median of CPU time,
ms_low and ms_high are its quartiles; bytes are those of K and V as stored, scales included; `bits` is the
true cost per value; the fraction is bytes / ms over the median bandwidth of the same turns. `simd`: the
instructions that the kernels were compiled for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlab.store import Exact, Float8, Growing, Int
from kvlab.store.growing import GrowingState

SHAPES = {  # KV heads, queries of each, channels
    "8 heads of 64": (8, 1, 64),
    "8 heads of 96": (8, 1, 96),
    "8 heads of 128": (8, 1, 128),
    "8 heads of 160": (8, 1, 160),
    "8 heads of 32": (8, 1, 32),
    "3 heads of 64, 3 queries each": (3, 3, 64),
}
DECODED = "8 heads of 128"  # of which the slow way is timed, too
SLOW = 3  # its turns
SWEPT = 2**26  # fp32 numbers read before a turn
FORMATS = {
    "full": Exact,
    "int8": lambda: Int(8),
    "int8-g32": lambda: Int(8, 32),
    "int5": lambda: Int(5),
    "int4": lambda: Int(4),
    "int4-g32": lambda: Int(4, 32),
    "fp8-e4m3": lambda: Float8("e4m3"),
    "fp8-e5m2": lambda: Float8("e5m2"),
}


def simd() -> str:
    """The instructions that kernels are compiled for here; `NUMBA_CPU_NAME` asks for fewer."""
    from kvlab.fast import lanes

    known = lanes.features()
    levels = {"AVX512": {"+avx512f"}, "AVX2": {"+avx2"}}
    return next((name for name, needed in levels.items() if needed <= known), "less")


def contestants(tokens: int, shape: str) -> dict[str, tuple]:
    """{name: (call, bytes of K and V, bits per value)} for one length; all hold the same K and V."""
    from kvlab import fast

    heads, share, head_dim = SHAPES[shape]
    torch.manual_seed(tokens)
    query = torch.randn(1, heads * share, 1, head_dim)
    keys, values = torch.randn(2, 1, heads, tokens, head_dim)
    scaling = head_dim**-0.5

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(query, keys, values, scale=scaling, enable_gqa=share > 1)

    made = {"fp32-sdpa": (sdpa, keys.nbytes + values.nbytes, 32.0)}
    for name, form in FORMATS.items():
        store = GrowingState(Growing(form()))
        store.append(keys, values)
        size = sum(part.nbytes for part in (*store.keys, *store.values))
        bits = 8 * size / (2 * keys.numel())
        if fast.fits(store, query):
            made[name] = (lambda s=store: fast.attend_packed(query, s, scaling), size, bits)
        if shape == DECODED and name != "full":
            made[f"{name}-decode"] = (lambda s=store: fast.reference(query, s, scaling), size, bits)
    return made


@torch.inference_mode()
def measure(tokens: int, repeats: int) -> list[dict]:
    """The rows of attention.json for one length."""
    swept = torch.ones(SWEPT)
    return [row for shape in SHAPES for row in rows(tokens, shape, repeats, swept)]


def rows(tokens: int, shape: str, repeats: int, swept: torch.Tensor) -> list[dict]:
    """Those of one shape. swept: what is read before every turn."""
    made = contestants(tokens, shape)
    slow = [name for name in made if name.endswith("-decode")]
    quick = [name for name in made if name not in slow]
    times: dict[str, list[float]] = {name: [] for name in made}
    reads: list[float] = []
    for turns, names in ((repeats, quick), (min(repeats, SLOW), slow)):
        for turn in range(turns + 1):
            for name in names:
                read, taken = seconds(swept.sum), seconds(made[name][0])
                if turn:  # the first one compiles and warms up
                    reads.append(read)
                    times[name].append(1e3 * taken)
    bandwidth = swept.nbytes / statistics.median(reads)
    medians = {name: statistics.median(ms) for name, ms in times.items()}
    found = []
    for name, (_, size, bits) in made.items():
        low, _, high = statistics.quantiles(times[name], n=4, method="inclusive")
        found.append({
            "shape": shape,
            "kernel": name,
            "bits": bits,
            "tokens": tokens,
            "ms": medians[name],
            "ms_low": low,
            "ms_high": high,
            "bytes": size,
            "fraction_of_bandwidth": size / (medians[name] / 1e3) / bandwidth,
            "speedup": medians["fp32-sdpa"] / medians[name],
            "bandwidth_gbps": bandwidth / 1e9,
        })  # fmt: skip
    return found


def seconds(call: Callable) -> float:
    """CPU time of a call."""
    started = time.process_time()
    call()
    return time.process_time() - started
