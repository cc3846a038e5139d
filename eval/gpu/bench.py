"""Bench: the measured device: its clock, its memory, its graphs, and its bandwidth.

Everything runs on a CPU too, in small (`dry`): there the clock is the host's, and what only a GPU has (CUDA
graphs, memory peaks, streams) is left out of the rows.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import cached_property

import psutil
import torch

SIDE_STREAM_CALLS = 3  # before a graph is captured: compilers and allocators do their work
PART = 0.9  # of the free memory that may be asked for


class Bench:
    """What a stage measures with.

    device: "cuda" or, for a dry run, "cpu". said: lines for the log, one for each thing that did not go as
    planned. models: what `models.py` made, kept while it is asked for again.
    """

    def __init__(self, dry: bool, say: Callable[[str], None] = lambda line: None):
        self.device = torch.device("cpu" if dry else "cuda")
        self.on_gpu = not dry
        self.said: list[str] = []
        self.models: dict = {}
        self.spoiled = False  # whether the process should not go on after this unit
        self._say = say

    def say(self, line: str) -> None:
        """A line for the log and for the unit's notes."""
        self.said.append(line)
        self._say(line)

    def left_out(self, what: str, error: Exception) -> str:
        """Why there are no numbers of something; an error that spoils the device is raised again."""
        text = str(error).lower()
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)  # on the device, or on the host
        harmless = full or any(word in text for word in ("out of memory", "captur", "not permitted"))
        if "cuda error" in text and not harmless:
            raise error
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.say(f"{what}: left out: {why[:140]}")
        return why

    @property
    def capability(self) -> tuple[int, int] | None:
        """Of the GPU; None without one."""
        return torch.cuda.get_device_capability() if self.on_gpu else None

    # The clock.

    def sync(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def once(self, call: Callable[[], object], times: int = 1) -> float:
        """Milliseconds of one call, the mean of so many that follow each other, from an idle device to an
        idle device: events on a GPU, so that what the host needs to launch it counts as far as the device
        waits for it."""
        self.sync()
        if not self.on_gpu:
            return self.wall(call)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times

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
        body()
        self.sync()
        torch.cuda.set_sync_debug_mode("error")  # cheaper to learn here than from a capture that breaks off
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode("default")
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
        """Free unused memory."""
        if self.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()

    # What it can do at best, measured once.

    @cached_property
    def bandwidth(self) -> float:
        """Bytes per second of a large copy on the device, read and written ones counted: the base of every
        fraction of bandwidth."""
        size = min(2**31 if self.on_gpu else 2**24, int(self.free_bytes() * PART / 4))
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        times = self.interleaved({"copy": lambda: target.copy_(source)}, 9)["copy"]
        return 2 * size / statistics.median(times) * 1e3


def spread(times: list[float]) -> dict[str, float]:
    """The median of some times, and the quarters below and above."""
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    return {"ms": statistics.median(ordered), "ms_low": low, "ms_high": high, "repeats": len(ordered)}
