"""Link: what carries bytes between host and device, with a record of every transfer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..policy import slot_index
from .pipelined import PipelinedState
from .staging import Staging

RECORDS = 100_000  # transfers remembered; older ones are forgotten


class LinkError(RuntimeError):
    """A transfer failed or was too slow. The cache it belonged to needs a reset()."""


@dataclass(eq=False)
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
    waited: tuple[float, float] | None = None  # when somebody began to wait for it, and had it
    future: Future | None = field(default=None, repr=False)

    @property
    def error(self) -> BaseException | None:
        """Why it failed, once it is through."""
        return self.future.exception() if self.future is not None and self.future.done() else None

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors at their destination. Raises LinkError; Ctrl-C gets through."""
        begun = time.perf_counter()
        try:
            error = self.future.exception(self.timeout)
        except TookTooLong:
            raise LinkError(f"{self._name()} took longer than the timeout of {self.timeout:g} s") from None
        self.waited = begun, time.perf_counter()
        if error is not None:
            said = str(error) or type(error).__name__
            raise LinkError(f"{self._name()} failed: {said}") from error
        future, self.future = self.future, Future()  # the result is handed over, not remembered
        self.future.set_result(None)
        return future.result()

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
        self.uncommitted: Callable[[], None] = lambda: None  # stores the part of a prompt written last
        self._lanes: dict[str, Lane] = {}

    def __deepcopy__(self, memo) -> Link:
        return self

    def start(self, host, layer) -> PipelinedState:
        """The state of a host whose bytes this link carries."""
        return PipelinedState(host, layer)

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
        """Wait until nothing is under way, or `timeout` is over. Results stay for those who asked."""
        until = time.perf_counter() + self.timeout
        for transfer in list(self.records):
            try:
                transfer.future.exception(max(0.0, until - time.perf_counter()))
            except TookTooLong:
                return

    def release(self, parts: tuple[Tensor, ...]) -> None:
        """The tensors of a finished fetch are used no more."""
        self.staging.give_back(parts)

    def abandon(self, transfer: Transfer) -> None:
        """Nobody will wait for it any more: its buffers are free once it is through."""

        def let_go(future: Future) -> None:
            if transfer.toward == "device" and future.exception() is None and future.result() is not None:
                self.release(future.result())

        transfer.future.add_done_callback(let_go)

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
        lane = self._lanes.setdefault(toward, Lane(toward))
        transfer = Transfer(why, layer, bytes, toward, self.timeout, submitted=time.perf_counter())
        transfer.future = lane.worker.submit(lane.carry, transfer, work, self.seconds(bytes))
        self.records.append(transfer)
        return transfer


class Lane:
    """One direction of a link: a worker that serves one transfer after another, none faster than the link.

    The worker ends when the lane is collected.
    """

    def __init__(self, toward: str):
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=f"link-{toward}")
        self.free = 0.0  # when the lane is free again, by the link's own clock

    def carry(self, transfer: Transfer, work, least: float) -> tuple[Tensor, ...]:
        """Do the work and return its result, `least` seconds after it could begin."""
        transfer.started = max(transfer.submitted, self.free)
        try:
            return work()
        finally:
            due, now = transfer.started + least, time.perf_counter()
            if due > now:
                time.sleep(due - now)
            transfer.finished = self.free = max(due, now)  # what sleep overshoots delays no later transfer


def gather(parts: tuple[Tensor, ...], slots: Tensor | None, into: tuple[Tensor, ...]) -> None:
    """Copy the given slots (None: all) of every part into its target, which has one slot more. What that one
    then holds is undefined: a gather of as many rows as the target has needs no copy of its own."""
    for part, target in zip(parts, into, strict=True):
        if slots is None:
            target[:, :, : part.shape[2]].copy_(part)
        else:
            flat, index = slot_index(part, pad(slots, (0, 1)))
            torch.index_select(flat, 0, index, out=target.flatten(0, 2))
