"""Link: what carries bytes between host and device, with a record of every transfer (document 001)."""

from __future__ import annotations

import math
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..answer import slot_index
from .staging import Staging

_handover = threading.Lock()
RECORDS = 100_000  # transfers remembered; older ones are forgotten


class LinkError(RuntimeError):
    """A transfer failed, was too slow, or its worker is gone. The cache it belonged to needs a reset()."""


@dataclass(eq=False)
class Transfer:
    """A handle to wait on while the transfer runs, its record afterwards. Times: `perf_counter`."""

    why: str  # "prefetch" (asked one layer ahead), "fetch" (asked when needed), "write" (back to the host)
    layer: int
    bytes: int
    toward: str  # "device" or "host"
    submitted: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    waited: tuple[float, float] | None = None  # when somebody began to wait for it, and had it
    error: BaseException | None = field(default=None, repr=False)
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _work: Callable | None = field(default=None, repr=False)
    _result: tuple[Tensor, ...] | None = field(default=None, repr=False)
    _link: object = field(default=None, repr=False)
    _unwanted: bool = False
    _least: float = field(default=0.0, repr=False)  # seconds
    _worker: threading.Thread | None = field(default=None, repr=False)

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors at their destination. Raises LinkError; Ctrl-C gets through."""
        begun = time.perf_counter()
        link = self._link
        while not self._done.wait(min(0.2, link.timeout)):
            if not self._worker.is_alive() and not self._done.is_set():
                raise LinkError(f"the link's worker is gone; {self._name()} never arrived: reset the cache")
            if time.perf_counter() - begun > link.timeout:
                raise LinkError(f"{self._name()} took longer than the timeout of {link.timeout:g} s")
        self.waited = begun, time.perf_counter()
        if self.error is not None:
            raise LinkError(f"{self._name()} failed: {self.error}") from self.error
        result, self._result = self._result, None
        return result

    def abandon(self) -> None:
        """Nobody will wait for it any more: its buffers are free once it is through."""
        with _handover:
            self._unwanted = True
            here = self._done.is_set() and self.error is None
        if here and self.toward == "device":
            self._link.release(self._result)

    def _name(self) -> str:
        return f"the {self.why} of layer {self.layer} ({self.bytes} bytes toward the {self.toward})"


class Link:
    """Two lanes, toward the device and toward the host, each a thread that does one transfer at a time.

    The base class carries at the speed of the machine's own copies. timeout: seconds after which somebody
    who waits for a transfer gives up. `records` holds every finished and running transfer, oldest first.
    A link is shared by all layers of a cache, and may be shared by several caches.
    """

    def __init__(self, timeout: float = 60.0):
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: expected a positive number of seconds")
        self.timeout = timeout
        self.records: deque[Transfer] = deque(maxlen=RECORDS)
        self.staging = Staging()
        self.unlanded: Callable[[], None] = lambda: None  # stores the part of a prompt written last
        self._lanes: dict[str, tuple[queue.SimpleQueue, threading.Thread]] = {}

    def __deepcopy__(self, memo) -> Link:
        return self

    def fetch(self, parts: tuple[Tensor, ...], slots: Tensor | None, **about) -> Transfer:
        """Gather rows on the host and carry them to the device.

        parts: tensors `[batch, kv_heads, tokens, width]` as the store holds them; slots `[batch, kv_heads,
        n]` or None for all; about: `layer`, `bytes` and `why`. The transfer yields tensors `[batch, kv_heads,
        n + 1, width]`, the last slot left free for the newest token; hand them back with `release`.
        """
        slots = None if slots is None else slots.to(parts[0].device)  # here: it may wait for the model
        tokens = parts[0].shape[2] if slots is None else slots.shape[2]
        shapes = [(*part.shape[:2], tokens + 1, part.shape[3]) for part in parts]
        staged = self.staging.take(shapes, [part.dtype for part in parts])

        def work() -> tuple[Tensor, ...]:
            gather(parts, slots, staged)
            return self._to_device(staged)

        return self._submit(work, "device", **about)

    def write(self, parts: tuple[Tensor, ...], **about) -> Transfer:
        """Carry tensors from the device to the host; the transfer yields copies there."""
        ready = self._mark()
        return self._submit(lambda: self._to_host(parts, ready), "host", **about)

    def drain(self) -> None:
        """Wait until nothing is under way, a worker is gone or `timeout` is over. Results stay for those who
        asked."""
        until = time.perf_counter() + self.timeout
        for transfer in list(self.records):
            while not transfer._done.wait(min(0.2, self.timeout)):
                if not transfer._worker.is_alive() or time.perf_counter() > until:
                    return

    def release(self, parts: tuple[Tensor, ...]) -> None:
        """The tensors of a finished fetch are used no more."""
        self.staging.give_back(parts)

    def seconds(self, size: int) -> float:
        """Least time that a transfer of `size` bytes takes."""
        return 0.0

    def paged(self, page: int, fault: float) -> Link:
        """The same wires under unified memory: pages of `page` bytes, `fault` seconds for each."""
        return self

    def _to_device(self, staged: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return staged

    def _to_host(self, parts: tuple[Tensor, ...], ready) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in parts)

    def _mark(self):
        """What a write must wait for before its source may be read."""

    def _submit(self, work, toward: str, *, layer: int, bytes: int, why: str) -> Transfer:
        transfer = Transfer(why, layer, bytes, toward, _work=work, _link=self, _least=self.seconds(bytes))
        if toward not in self._lanes or not self._lanes[toward][1].is_alive():
            jobs = queue.SimpleQueue()
            worker = threading.Thread(target=_serve, args=(jobs,), name=f"link-{toward}", daemon=True)
            self._lanes[toward] = jobs, worker
            worker.start()
            weakref.finalize(self, _stop, jobs, worker)
        jobs, transfer._worker = self._lanes[toward]
        transfer.submitted = time.perf_counter()
        self.records.append(transfer)
        jobs.put(transfer)
        return transfer


def _stop(jobs: queue.SimpleQueue, worker: threading.Thread) -> None:
    """End a lane; also at the interpreter's exit, where a running thread would be torn off."""
    jobs.put(None)
    if worker is not threading.current_thread():
        worker.join(timeout=5)


def _serve(jobs: queue.SimpleQueue) -> None:
    """A lane's worker: one transfer after another, none faster than the link."""
    free = 0.0  # when the lane is free again, by the link's own clock
    while (transfer := jobs.get()) is not None:
        work, transfer._work = transfer._work, None
        transfer.started = max(transfer.submitted, free)
        try:
            transfer._result = work()
        except Exception as error:
            transfer.error = error
        due, now = transfer.started + transfer._least, time.perf_counter()
        if due > now:
            time.sleep(due - now)
        transfer.finished = free = max(due, now)  # what sleep overshoots delays no later transfer
        link, transfer._link = transfer._link, weakref.proxy(transfer._link)
        with _handover:
            transfer._done.set()
            unwanted = transfer._unwanted and transfer.error is None
        if unwanted and transfer.toward == "device":
            link.release(transfer._result)
        del work, transfer, link


class ModelledLink(Link):
    """A link of stated speed: the data are really copied, and arrive when the bandwidth allows.

    bandwidth: bytes per second in either direction. latency: seconds that every transfer pays. page: bytes;
    if given, only whole pages cross, and every page pays the latency (unified memory's faults).
    """

    def __init__(self, bandwidth: float, latency: float = 10e-6, page: int | None = None, timeout=60.0):
        super().__init__(timeout)
        if not isinstance(bandwidth, int | float) or not bandwidth > 0:
            raise ValueError(f"bandwidth={bandwidth!r}: expected a positive number of bytes per second")
        if not isinstance(latency, int | float) or not 0 <= latency < math.inf:
            raise ValueError(f"latency={latency!r}: expected seconds, 0 or more")
        if page is not None and (not isinstance(page, int) or page < 1):
            raise ValueError(f"page={page!r}: expected a positive number of bytes")
        self.bandwidth, self.latency, self.page = float(bandwidth), float(latency), page
        self.about = ""  # where the numbers come from, if not from the caller

    def __repr__(self) -> str:
        page = f", page={self.page}" if self.page else ""
        about = f": {self.about}" if self.about else ""
        return f"ModelledLink({self.bandwidth:.3g} B/s, latency={self.latency:.3g} s{page}){about}"

    def seconds(self, size: int) -> float:
        if self.page is None:
            return self.latency + size / self.bandwidth
        return math.ceil(size / self.page) * (self.latency + self.page / self.bandwidth)

    def paged(self, page: int, fault: float) -> ModelledLink:
        return ModelledLink(self.bandwidth, fault, page, self.timeout)


def gather(parts: tuple[Tensor, ...], slots: Tensor | None, into: tuple[Tensor, ...]) -> None:
    """Copy the given slots (None: all) of every part into its target, which has one slot more. What that one
    then holds is undefined: a gather of as many rows as the target has needs no copy of its own."""
    for part, target in zip(parts, into, strict=True):
        if slots is None:
            target[:, :, : part.shape[2]].copy_(part)
        else:
            flat, index = slot_index(part, pad(slots, (0, 1)))
            torch.index_select(flat, 0, index, out=target.flatten(0, 2))
