"""Stage link: transfers between host and device, by size and direction."""

from __future__ import annotations

import torch

from .bench import spread
from .unit import FIRST, Unit

REPEATS = 9


def units(size: str) -> list[Unit]:
    sizes = [2**12, 2**16] if size == "dry" else [2**n for n in range(12, 31, 2)]
    return [Unit("link", "copies", FIRST, 8, {"sizes": sizes})]


def pinned(bench, size: int) -> torch.Tensor:
    """Bytes in memory that a GPU can copy from directly."""
    return torch.ones(size, dtype=torch.uint8, pin_memory=bench.on_gpu)


def device(bench, size: int) -> torch.Tensor:
    """Bytes on the device."""
    return torch.ones(size, dtype=torch.uint8, device=bench.device)


def measure(bench, sizes: list[int]) -> dict:
    """Copies of pinned memory, either way and both at once, and of pageable memory. fraction: of the largest
    copy of its kind."""
    bench.clear()
    found, side = [], torch.cuda.Stream() if bench.on_gpu else None
    for size in sizes:
        host, other = pinned(bench, size), pinned(bench, size)
        here, there = device(bench, size), device(bench, size)
        pageable = torch.ones(size, dtype=torch.uint8)

        def both(here=here, host=host, other=other, there=there):
            if side is not None:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # None: the current one
                other.copy_(there, non_blocking=True)
            here.copy_(host, non_blocking=True)
            if side is not None:
                torch.cuda.current_stream().wait_stream(side)

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
