"""Link: carries bytes between host and device, and records every transfer; and one of stated speed."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import first_line
from ..gather import slot_index
from ..modes import keeping
from ..parameters import shown
from .staging import Staging

LARGEST = 1e300  # of bytes per second, and of seconds: a whole number beyond is no float
RECORDS = 10_000  # transfers remembered; older ones are forgotten
WORDS = (torch.int32, torch.int16, torch.uint8)  # as 64 bits: what a product moves out at the top is no loss


class LinkError(RuntimeError):
    """A transfer failed or was too slow. The cache it belonged to needs a reset()."""


@dataclass(eq=False, slots=True)
class Transfer:
    """A handle to wait on while the transfer runs, its record afterwards. Times: `perf_counter`."""

    why: str  # "prefetch" (asked one layer ahead), "fetch" (asked when needed), "write" (back to the host)
    layer: int
    bytes: int
    toward: str  # "device" or "host"
    timeout: float = 60.0  # seconds after which `wait` gives up
    submitted: float = 0.0
    started: float = 0.0
    finished: float = 0.0
    future: Future | None = field(default=None, repr=False)  # the result, until it is handed over

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors at their destination. Raises LinkError; Ctrl-C gets through."""
        try:
            error = self.future.exception(self.timeout)
        except TookTooLong:
            raise LinkError(f"{self._name()} took longer than the timeout of {self.timeout:g} s") from None
        if error is not None:
            raise LinkError(f"{self._name()} failed: {first_line(error)}") from error
        future, self.future = self.future, None
        return future.result()

    def _name(self) -> str:
        return f"the {self.why} of layer {self.layer} ({self.bytes} bytes toward the {self.toward})"


class Link:
    """Two lanes, toward the device and toward the host, each a thread that does one transfer at a time.

    The base class transfers at the speed of the machine's own copies. timeout: seconds after which waiting
    for a transfer fails. `records` holds finished and running transfers, oldest first. Arrived tensors are
    compared with those sent (see `Parcel`): a difference raises LinkError in `wait`. A link is shared by all
    layers of a cache, and may be shared by several caches and threads. Its own threads end when it is no
    longer referenced.
    """

    seals = True  # whether contents are compared besides shapes
    on_gpu = False  # whether it leads to a GPU

    def __init__(self, timeout: float = 60.0):
        if not isinstance(timeout, int | float) or not 0 < timeout <= threading.TIMEOUT_MAX:
            raise ValueError(f"timeout={shown(timeout)}: expected a positive number of seconds")
        self.timeout, self.process = timeout, os.getpid()
        self.records: deque[Transfer] = deque(maxlen=RECORDS)
        self.staging = Staging()
        self._lanes = {toward: Lane(toward) for toward in ("device", "host")}

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
        staged, parcel = self.staging.take(shapes, [part.dtype for part in parts]), Parcel(parts, shapes)

        work = lambda: self._collect(parts, slots, staged, parcel)
        return self._submit(work, "device", parcel=parcel, **about)

    def write(self, parts: tuple[Tensor, ...], **about) -> Transfer:
        """Carry tensors from the device to the host; the transfer yields copies there."""
        ready, parcel = self._mark(), Parcel(parts, [tuple(part.shape) for part in parts])

        def work() -> tuple[Tensor, ...]:
            parcel.seal(parts, self.seals)
            return self._to_host(parts, ready)

        return self._submit(work, "host", parcel=parcel, **about)

    def drain(self) -> None:
        """Wait until nothing is under way, or `timeout` is over. Results stay for those who asked."""
        ends = [lane.worker.submit(int) for lane in self._lanes.values()]
        wait(ends, self.timeout)

    def release(self, parts: tuple[Tensor, ...]) -> None:
        """The tensors of a finished fetch are used no more."""
        self.staging.give_back(parts)

    def abandon(self, transfer: Transfer) -> None:
        """It will not be waited for: its buffers are free once it has ended."""
        future, transfer.future = transfer.future, None
        if future is not None and transfer.toward == "device":
            future.add_done_callback(self._let_go)

    def _let_go(self, future: Future) -> None:
        if future.exception() is None:
            self.release(future.result())

    def seconds(self, size: int) -> float:
        """Least time that a transfer of `size` bytes takes."""
        return 0.0

    def paged(self, page: int, fault: float) -> Link:
        """The same wires under unified memory: pages of `page` bytes, `fault` seconds for each."""
        return self

    def _collect(self, parts, slots: Tensor | None, staged, parcel: Parcel) -> tuple[Tensor, ...]:
        """Gather rows and carry them to the device."""
        gather(parts, slots, staged)
        parcel.seal(staged, self.seals)
        return staged

    def _to_host(self, parts: tuple[Tensor, ...], ready) -> tuple[Tensor, ...]:
        return tuple(part.clone() for part in parts)

    def _mark(self):
        """What a write must wait for before its source may be read."""

    def _submit(self, work, toward: str, *, parcel: Parcel, layer: int, bytes: int, why: str) -> Transfer:
        if self.process != os.getpid():
            raise LinkError("this link's threads are in the process that forked this one; make a cache here")
        lane = self._lanes[toward]
        transfer = Transfer(why, layer, bytes, toward, self.timeout, submitted=time.perf_counter())
        if (least := self.seconds(bytes)) > self.timeout:  # to wait for it would look like a hang
            late = f"{least:.3g} s, more than the timeout of {self.timeout:g} s"
            raise LinkError(f"{transfer._name()} would take {late}")
        transfer.future = lane.worker.submit(lane.carry, transfer, work, parcel, least)
        self.records.append(transfer)
        return transfer


class Lane:
    """One direction of a link: a worker that serves one transfer after another, none faster than the link.

    The worker ends when the lane is collected.
    """

    def __init__(self, toward: str):
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=f"link-{toward}")
        self.free = 0.0  # when the lane is free again, by the link's own clock

    def carry(self, transfer: Transfer, work, parcel: Parcel, least: float) -> tuple[Tensor, ...]:
        """Do the work and return its result, `least` seconds after it could begin. ValueError where it is not
        what the parcel held."""
        transfer.started = max(transfer.submitted, self.free)
        try:
            return parcel.checked(work())
        finally:
            due, now = transfer.started + least, time.perf_counter()
            if due > now:
                time.sleep(due - now)
            transfer.finished = self.free = max(due, now)  # what sleep overshoots delays no later transfer


class ModelledLink(Link):
    """A link of stated speed: the data are really copied, and arrive when the bandwidth allows.

    bandwidth: bytes per second in either direction. latency: seconds that every transfer pays. page: bytes;
    if given, only whole pages cross, and every page pays the latency (unified memory's faults).
    """

    def __init__(self, bandwidth: float, latency: float = 10e-6, page: int | None = None, timeout=60.0):
        super().__init__(timeout)
        if not isinstance(bandwidth, int | float) or not 0 < bandwidth < LARGEST:
            raise ValueError(f"bandwidth={shown(bandwidth)}: expected a positive number of bytes per second")
        if not isinstance(latency, int | float) or not 0 <= latency < LARGEST:
            raise ValueError(f"latency={shown(latency)}: expected seconds, 0 or more")
        if page is not None and (not isinstance(page, int) or page < 1):
            raise ValueError(f"page={shown(page)}: expected a positive number of bytes")
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


class Parcel:
    """What a transfer has to deliver: tensors of these shapes and dtypes, and of this content.

    parts: tensors with the dtypes; shapes: one for each. The content is known by a number for each tensor,
    the sum of its words, each times a factor of its place: a third of the time that gathering the rows takes.
    It is left out where the hardware does as much (see `CudaLink`).
    """

    def __init__(self, parts: tuple[Tensor, ...], shapes: list[tuple[int, ...]]):
        self.form = [(shape, part.dtype) for shape, part in zip(shapes, parts, strict=True)]
        self.sums: list[int] | None = None

    def seal(self, parts: tuple[Tensor, ...], sums: bool = True) -> None:
        """Called when it is sent, with what is in it."""
        self.sums = [checksum(part) for part in parts] if sums else None

    def checked(self, arrived) -> tuple[Tensor, ...]:
        """What arrived, if it is what was sent; else a ValueError."""
        whole = isinstance(arrived, tuple) and all(isinstance(part, Tensor) for part in arrived)
        if not whole or [(tuple(p.shape), p.dtype) for p in arrived] != self.form:
            raise ValueError("what arrived is not of the shape and kind of what was sent")
        if self.sums is not None and [checksum(part) for part in arrived] != self.sums:
            raise ValueError("what arrived is not what was sent")
        return arrived


def checksum(part: Tensor) -> int:
    """A number that any other word changes, and nearly any other order of them; part `[..., width]`."""
    rows = part.contiguous().flatten(0, -2).view(torch.uint8)
    word = next(dtype for dtype in WORDS if rows.shape[1] % dtype.itemsize == 0)
    words = rows.view(word).long()
    factors = odd(words.shape[1]).to(words.device)
    sums = (words * factors).sum(1) if words.is_cuda else words.mv(factors)
    return int((sums * torch.arange(1, 2 * len(sums) + 1, 2, device=sums.device)).sum())


@cache
@keeping()
def odd(count: int) -> Tensor:
    """Odd numbers of 64 bits, drawn once: a product with one tells a number as well as the number itself."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator, device="cpu") | 1


def gather(parts: tuple[Tensor, ...], slots: Tensor | None, into: tuple[Tensor, ...]) -> None:
    """Copy the given slots (None: all) of every part into its target, which has one slot more. What that one
    then holds is undefined: a gather of as many rows as the target has needs no copy of its own."""
    for part, target in zip(parts, into, strict=True):
        if slots is None:
            target[:, :, : part.shape[2]].copy_(part)
        else:
            flat, index = slot_index(part, pad(slots, (0, 1)))
            torch.index_select(flat, 0, index, out=target.flatten(0, 2))
