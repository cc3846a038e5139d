"""Stage link: what crosses between host and device, by size and direction, beside computation, and row by
row."""

from __future__ import annotations

import statistics

import torch

from . import about
from .bench import spread
from .right import triton_there
from .unit import FIRST, NEXT, Unit

REPEATS = 9
ROW_BYTES = 256  # K of one token and head, 128 dimensions of 16 bits
TILE = 2**22  # bytes
TAKEN = 0.1  # part of the rows that is gathered
PRODUCT = 4096  # rows and columns of the product beside which something is copied, on a GPU


def units(size: str) -> list[Unit]:
    if size == "dry":
        return [
            Unit("link", "copies", FIRST, 2, {"what": "copies", "sizes": [2**12, 2**16]}),
            Unit("link", "overlap", FIRST, 2, {"what": "overlap", "megabytes": 1}),
            Unit("link", "rows", NEXT, 2, {"what": "rows", "counts": [2000]}),
        ]
    return [
        Unit("link", "copies", FIRST, 8, {"what": "copies", "sizes": [2**n for n in range(12, 31, 2)]}),
        Unit("link", "overlap", FIRST, 5, {"what": "overlap", "megabytes": 512}),
        Unit("link", "rows", NEXT, 15, {"what": "rows", "counts": [20_000, 200_000, 2_000_000]}),
    ]


def measure(bench, what: str, **given) -> dict:
    bench.clear()
    return {"copies": copies, "overlap": overlap, "rows": rows}[what](bench, **given)


def pinned(bench, size: int) -> torch.Tensor:
    """Random bytes in memory that a GPU can copy from directly."""
    return noise(torch.empty(size, dtype=torch.uint8, pin_memory=bench.on_gpu))


def noise(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, filled with random bytes, which repeat."""
    part = torch.randint(0, 255, (min(TILE, len(tensor)),), dtype=torch.uint8)
    for start in range(0, len(tensor), TILE):
        piece = tensor[start : start + TILE]
        piece.copy_(part[: len(piece)])
    return tensor


def copies(bench, sizes: list[int]) -> dict:
    """Copies of pinned memory, either way and both at once, and of pageable memory. fraction: of the largest
    copy of its kind; of_pcie: of what the link's generation and lanes carry, where they are known."""
    found, sheet = [], about.pcie() if bench.on_gpu else None
    inward, outward = streams(bench), streams(bench)
    for size in sizes:
        host, other, here, there = (
            pinned(bench, size),
            pinned(bench, size),
            device(bench, size),
            device(bench, size),
        )
        pageable = noise(torch.empty(size, dtype=torch.uint8))

        def both(here=here, host=host, other=other, there=there):
            with inward() as first:
                here.copy_(host, non_blocking=True)
            with outward() as second:
                other.copy_(there, non_blocking=True)
            join(bench, first, second)

        calls = {
            "to device": lambda here=here, host=host: here.copy_(host, non_blocking=True),
            "to host": lambda other=other, there=there: other.copy_(there, non_blocking=True),
            "both at once": both,
            "to device, pageable": lambda here=here, pageable=pageable: here.copy_(pageable),
        }
        for name, times in bench.interleaved(calls, REPEATS if bench.on_gpu else 2).items():
            carried = size * (2 if name == "both at once" else 1)
            ms = spread(times)
            found.append({"copy": name, "size": size, **ms, "gbps": carried / ms["ms"] / 1e6})
        del calls, both
    largest = {row["copy"]: row["gbps"] for row in found if row["size"] == sizes[-1]}
    for row in found:
        row["fraction"] = row["gbps"] / largest[row["copy"]]
        if sheet is not None:
            ways = 2 if row["copy"] == "both at once" else 1
            row["of_pcie"] = row["gbps"] * 1e9 / (ways * sheet["bandwidth"])
    line = ", ".join(f"{name} {gbps:.1f} GB/s" for name, gbps in largest.items())
    return {"rows": found, "line": line}


def device(bench, size: int) -> torch.Tensor:
    return torch.randint(0, 255, (size,), dtype=torch.uint8, device=bench.device)


def streams(bench):
    """A context of a stream of its own, which begins where the current one is; yields the stream (None
    without a GPU)."""
    from contextlib import contextmanager

    stream = torch.cuda.Stream() if bench.on_gpu else None

    @contextmanager
    def within():
        if stream is None:
            yield None
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream

    return within


def join(bench, *others) -> None:
    """The current stream goes on when the others are through."""
    if bench.on_gpu:
        for other in others:
            torch.cuda.current_stream().wait_stream(other)


def overlap(bench, megabytes: int) -> dict:
    """Matrix products and a copy at the same time: hidden is the part of the shorter one that costs
    nothing."""
    size = megabytes * 2**20
    host, here, side = pinned(bench, size), device(bench, size), streams(bench)
    width = PRODUCT if bench.on_gpu else 64
    a, b = (torch.randn(width, width, device=bench.device).to(torch.bfloat16) for _ in "ab")

    def compute(times: int) -> None:
        for _ in range(times):
            a @ b

    copy_ms = statistics.median(
        bench.interleaved({"copy": lambda: here.copy_(host, non_blocking=True)}, 3)["copy"]
    )
    one = statistics.median(bench.interleaved({"product": lambda: compute(4)}, 3)["product"]) / 4
    times = max(1, min(10_000, round(copy_ms / one)))

    def together() -> None:
        with side() as stream:
            here.copy_(host, non_blocking=True)
        compute(times)
        join(bench, stream)

    calls = {
        "copy": lambda: here.copy_(host, non_blocking=True), "compute": lambda: compute(times),
        "both": together,
    }  # fmt: skip
    found = {
        name: spread(ms) for name, ms in bench.interleaved(calls, REPEATS if bench.on_gpu else 2).items()
    }
    alone = found["copy"]["ms"], found["compute"]["ms"]
    hidden = (sum(alone) - found["both"]["ms"]) / min(alone)
    rows = [{"overlap": name, "megabytes": megabytes, **ms} for name, ms in found.items()]
    rows.append({"overlap": "hidden", "megabytes": megabytes, "value": hidden})
    return {"rows": rows, "line": f"{hidden:.0%} of the shorter one is hidden"}


def rows(bench, counts: list[int]) -> dict:
    """Scattered rows of K: gathered by the device where they lie in pinned memory; gathered by the host into
    pinned memory and copied; and the same bytes in one copy, which nothing can beat."""
    found = []
    there = triton_there(bench)
    for count in counts:
        total = int(count / TAKEN)
        total = bench_rows(bench, total)
        count = int(total * TAKEN)
        source = pinned(bench, total * ROW_BYTES).view(1, 1, total, ROW_BYTES)
        chosen = torch.randperm(total)[:count].sort().values.view(1, 1, count)
        chosen_here = chosen.to(bench.device)
        staged = pinned(bench, count * ROW_BYTES).view(count, ROW_BYTES)
        here = device(bench, count * ROW_BYTES).view(count, ROW_BYTES)

        def staging(source=source, chosen=chosen, staged=staged, here=here):
            torch.index_select(source.view(-1, ROW_BYTES), 0, chosen.flatten(), out=staged)
            here.copy_(staged, non_blocking=True)

        calls = {
            "host gathers, one copy": staging,
            "one copy of as many bytes": lambda here=here, staged=staged: here.copy_(
                staged, non_blocking=True
            ),
        }
        if there:
            from kvlab.link.zero_copy import gather

            calls["device gathers"] = lambda source=source, chosen=chosen_here: gather(
                (source,), chosen, bench.device
            )
        size = count * ROW_BYTES
        for name, times in bench.interleaved(calls, REPEATS if bench.on_gpu else 2, bench.wall).items():
            ms = spread(times)
            found.append({"rows": name, "count": count, "bytes": size, **ms, "gbps": size / ms["ms"] / 1e6})
        del calls, staging
    best = {row["count"]: row["gbps"] for row in found if row["rows"] == "one copy of as many bytes"}
    for row in found:
        row["fraction"] = row["gbps"] / best[row["count"]]
    line = ", ".join(f"{row['rows']} {row['gbps']:.1f} GB/s" for row in found if row["count"] == max(best))
    return {"rows": found, "line": line}


def bench_rows(bench, total: int) -> int:
    """As many rows as host memory allows."""
    import psutil

    fits = int(psutil.virtual_memory().available * 0.5 / ROW_BYTES)
    if total > fits:
        bench.say(f"{total} rows do not fit into host memory: {fits} instead")
    return min(total, fits)
