"""Stage link: transfers between host and device, by size and direction, and beside computation."""

from __future__ import annotations

import statistics
from contextlib import contextmanager

import torch

from .bench import spread
from .unit import FIRST, Unit

REPEATS = 9
PRODUCT = 4096  # rows and columns of the product beside which something is copied, on a GPU


def units(size: str) -> list[Unit]:
    sizes, megabytes = ([2**12, 2**16], 1) if size == "dry" else ([2**n for n in range(12, 31, 2)], 512)
    return [
        Unit("link", "copies", FIRST, 8, {"sizes": sizes}),
        Unit("link", "overlap", FIRST, 5, {"megabytes": megabytes}),
    ]


def measure(bench, sizes: list[int] = (), megabytes: int = 0) -> dict:
    bench.clear()
    return copies(bench, sizes) if sizes else overlap(bench, megabytes)


def pinned(bench, size: int) -> torch.Tensor:
    """Bytes in memory that a GPU can copy from directly."""
    return torch.ones(size, dtype=torch.uint8, pin_memory=bench.on_gpu)


def device(bench, size: int) -> torch.Tensor:
    """Bytes on the device."""
    return torch.ones(size, dtype=torch.uint8, device=bench.device)


def copies(bench, sizes: list[int]) -> dict:
    """Copies of pinned memory, either way and both at once, and of pageable memory. fraction: of the largest
    copy of its kind."""
    found = []
    side = streams(bench)
    for size in sizes:
        host, other = pinned(bench, size), pinned(bench, size)
        here, there = device(bench, size), device(bench, size)
        pageable = torch.ones(size, dtype=torch.uint8)

        def both(here=here, host=host, other=other, there=there):
            with side() as stream:
                other.copy_(there, non_blocking=True)
            here.copy_(host, non_blocking=True)
            join(stream)

        calls = {
            "to device": lambda here=here, host=host: here.copy_(host, non_blocking=True),
            "to host": lambda other=other, there=there: other.copy_(there, non_blocking=True),
            "both at once": both,
            "to device, pageable": lambda here=here, pageable=pageable: here.copy_(pageable),
        }
        for name, times in bench.interleaved(calls, REPEATS if bench.on_gpu else 2).items():
            ms, carried = spread(times), size * (2 if name == "both at once" else 1)
            found.append({"what": name, "bytes": carried, **ms, "gbps": carried / ms["ms"] / 1e6})
        del calls, both
    largest = {row["what"]: row["gbps"] for row in found}  # the last of its kind
    for row in found:
        row["fraction"] = row["gbps"] / largest[row["what"]]
    return {"rows": found, "line": ", ".join(f"{name} {gbps:.1f} GB/s" for name, gbps in largest.items())}


def streams(bench):
    """A context of a stream of its own, which begins where the current one is; yields the stream (None
    without a GPU)."""
    stream = torch.cuda.Stream() if bench.on_gpu else None

    @contextmanager
    def within():
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # of None: the current one
            yield stream

    return within


def join(stream) -> None:
    """The current stream goes on when the other one is through."""
    if stream is not None:
        torch.cuda.current_stream().wait_stream(stream)


def overlap(bench, megabytes: int) -> dict:
    """Matrix products and a copy at the same time: hidden is the part of the shorter one that costs
    nothing."""
    size, repeats = megabytes * 2**20, REPEATS if bench.on_gpu else 2
    host, here, side = pinned(bench, size), device(bench, size), streams(bench)
    width = PRODUCT if bench.on_gpu else 64
    a, b = (torch.randn(width, width, device=bench.device).to(torch.bfloat16) for _ in "ab")

    def copy() -> None:
        here.copy_(host, non_blocking=True)

    def compute(times: int) -> None:
        for _ in range(times):
            a @ b

    def together() -> None:
        with side() as stream:
            copy()
        compute(times)
        join(stream)

    once = bench.interleaved({"copy": copy, "product": lambda: compute(4)}, 3)
    times = round(4 * statistics.median(once["copy"]) / statistics.median(once["product"]))
    times = max(1, min(10_000, times))
    calls = {"copy alone": copy, "products alone": lambda: compute(times), "both together": together}
    found = {name: spread(ms) for name, ms in bench.interleaved(calls, repeats).items()}
    *alone, both = (one["ms"] for one in found.values())
    hidden = (sum(alone) - both) / min(alone)
    rows = [{"what": name, "bytes": size, **ms} for name, ms in found.items()]
    rows[-1]["fraction"] = hidden
    return {"rows": rows, "line": f"{hidden:.0%} of the shorter one is hidden"}
