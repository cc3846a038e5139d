"""Bench: the device that is measured: its clock, its memory, its graphs, and what it can do at best.

Everything runs on a CPU too, in small (`dry`): there the clock is the host's, and what only a GPU has (CUDA
graphs, memory peaks, streams) is left out of the rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

SIDE_STREAM_CALLS = 3  # before a graph is captured: compilers and allocators do their work
SEVERAL = 10  # replays of a graph between two events
PART = 0.9  # of the free memory that may be asked for
PRODUCT = 8192  # rows and columns of the product that says what a GPU computes at best


class Bench:
    """What a stage measures with.

    device: "cuda" or, for a dry run, "cpu". said: lines for the log, one for each thing that did not go as
    planned. models: what `models.py` made, kept while it is asked for again.
    """

    def __init__(self, dry: bool, say: Callable[[str], None] = lambda line: None):
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.on_gpu = not dry
        self.said: list[str] = []
        self.models: dict = {}
        self.spoiled = False  # whether the process should not go on after this unit
        self._say = say
        self._flush = None
        self._best: dict[str, float] = {}

    def say(self, line: str) -> None:
        """A line for the log and for the unit's notes."""
        self.said.append(line)
        self._say(line)

    @property
    def capability(self) -> tuple[int, int] | None:
        """Of the GPU; None without one."""
        if not self.on_gpu:
            return None
        card = torch.cuda.get_device_properties(0)
        return card.major, card.minor

    # The clock.

    def sync(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object], flush: bool = False) -> float:
        """Milliseconds of one call, from an idle device to an idle device: events on a GPU, so that what the
        host needs to launch it counts as far as the device waits for it."""
        if flush:
            self.flush()
        self.sync()
        if not self.on_gpu:
            begun = time.perf_counter()
            call()
            return (time.perf_counter() - begun) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def replayed(self, call: Callable[[], object]) -> float:
        """Milliseconds of one call, the mean of several that follow each other: from an idle device the first
        one waits for its launch, the others find it queued."""
        several = SEVERAL if self.on_gpu else 1

        def calls() -> None:
            for _ in range(several):
                call()

        return self.once(calls) / several

    def wall(self, call: Callable[[], object]) -> float:
        """Milliseconds of one call by the host's clock, from an idle device to an idle device."""
        self.sync()
        begun = time.perf_counter()
        call()
        self.sync()
        return (time.perf_counter() - begun) * 1e3

    def interleaved(
        self, calls: dict[str, Callable[[], object]], repeats: int, clock: Callable | None = None
    ) -> dict[str, list[float]]:
        """Milliseconds of every call, one of each in turn, after one round that is not counted."""
        clock = clock or self.once
        times: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(repeats + 1):
            for name, call in calls.items():
                taken = clock(call)
                if repeat:
                    times[name].append(taken)
        return times

    def flush(self) -> None:
        """Push everything out of the device's cache."""
        if self._flush is None:
            size = 4 * self.cache_bytes if self.on_gpu else 4096
            self._flush = torch.empty(size // 4, dtype=torch.int32, device=self.device)
        self._flush.zero_()

    @property
    def cache_bytes(self) -> int:
        """Bytes of the device's last-level cache."""
        if not self.on_gpu:
            return 4096
        about = torch.cuda.get_device_properties(0)
        return getattr(about, "L2_cache_size", 0) or 64 * 2**20

    # Graphs.

    def captured(self, body: Callable[[], object]) -> Callable[[], object] | None:
        """The body's kernels as a CUDA graph: a call that replays them; None without a GPU. Raises what the
        capture raises: a body that waits for the device cannot be captured."""
        if not self.on_gpu:
            return None
        self.refuse_waits(body)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(SIDE_STREAM_CALLS):
                body()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                body()
        except BaseException:
            torch.cuda.set_stream(before)  # torch leaves the stream of a capture that failed in force
            self.spoiled = True  # and its allocator in doubt
            raise
        return graph.replay

    def refuse_waits(self, body: Callable[[], object]) -> None:
        """RuntimeError where the body makes the host wait for the device; cheaper to learn here than from a
        capture that breaks off."""
        body()
        self.sync()
        torch.cuda.set_sync_debug_mode("error")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    # Memory.

    def clear(self) -> None:
        """Hold no model any more."""
        self.models.clear()
        self.tidy()

    def free_bytes(self) -> int:
        """Bytes that can be allocated on the device now."""
        if not self.on_gpu:
            return min(psutil.virtual_memory().available, 2 * 2**30)
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached

    def tidy(self) -> None:
        """Give back what nobody holds any more."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Bytes that tensors hold on the device; 0 without a GPU."""
        return torch.cuda.memory_allocated() if self.on_gpu else 0

    @contextmanager
    def peak(self, before: int) -> Iterator[dict]:
        """Yields a dictionary that holds `peak_bytes` afterwards: the most that was allocated meanwhile, over
        `before` bytes; None without a GPU."""
        found: dict = {"peak_bytes": None}
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        try:
            yield found
        finally:
            if self.on_gpu:
                found["peak_bytes"] = torch.cuda.max_memory_allocated() - before

    def shrunk(self, sizes: list[int], needs: Callable[[int], float], what: str) -> int:
        """The first of these sizes, largest first, whose `needs(size)` bytes are free; says so where it is
        not the first. Raises MemoryError where none is."""
        free = PART * self.free_bytes()
        for size in sizes:
            if needs(size) <= free:
                if size != sizes[0]:
                    needed = needs(sizes[0]) / 1e9
                    self.say(f"{what} {sizes[0]} needs {needed:.1f} GB of {free / 1e9:.1f}: {size} instead")
                return size
        smallest = sizes[-1]
        raise MemoryError(
            f"{what} {smallest} needs {needs(smallest) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free"
        )

    # What it can do at best, measured once.

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, read and written ones counted: the base of every
        fraction of bandwidth."""
        if "bandwidth" not in self._best:
            size = min(2**31 if self.on_gpu else 2**24, int(self.free_bytes() * PART / 4))
            source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            times = self.interleaved({"copy": lambda: target.copy_(source)}, 9)["copy"]
            self._best["bandwidth"] = 2 * size / statistics.median(times) * 1e3
        return self._best["bandwidth"]

    @property
    def flops(self) -> float:
        """Operations per second of a large bf16 matrix product of random numbers."""
        if "flops" not in self._best:
            size = PRODUCT if self.on_gpu else 256
            a, b = (torch.randn(size, size, device=self.device).to(torch.bfloat16) for _ in "ab")
            times = self.interleaved({"product": lambda: a @ b}, 7)["product"]
            self._best["flops"] = 2 * size**3 / statistics.median(times) * 1e3
        return self._best["flops"]


def spread(times: list[float]) -> dict[str, float]:
    """The median of some times, and the quarters below and above."""
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return {"ms": statistics.median(ordered), "ms_low": low, "ms_high": high, "repeats": len(ordered)}


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on the device or on the host."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in str(error).lower()
