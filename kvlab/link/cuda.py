"""CudaLink: a real link, over pinned memory and streams of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import faster
from ..devices import device_of
from ..gather import by_head, by_token
from .base import Link, Parcel, Transfer, gather
from .staging import Staging

LEAST_ROOM = 16  # slots behind a prompt


class CudaLink(Link):
    """A link to a GPU. It waits for events, never for the whole device, so that transfers overlap the model's
    kernels.

    Host memory holds token after token, so a whole layer crosses in one copy of each of its parts. Chosen
    rows are gathered by the device, whose kernel reads them from pinned memory, or, without triton, by the
    host, whose worker collects them in pinned memory for one copy. PCIe and NVLink check every packet (CRC),
    so contents are not compared again. ValueError where no GPU is present.
    """

    seals, on_gpu = False, True

    def __init__(self, device="cuda", timeout: float = 60.0):
        super().__init__(timeout)
        self.device = device_of(device)
        if self.device.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f"device={str(device)!r}: a CudaLink needs a CUDA device")
        self.staging = Staging(pinned=True)
        self._inward, self._outward = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._rows = faster.gather()

    def fetch(self, parts: tuple[Tensor, ...], slots: Tensor | None, **about) -> Transfer:
        if not all(part.is_pinned() for part in parts):
            return super().fetch(parts, slots, **about)
        if slots is None and all(by_token(part).is_contiguous() for part in parts):
            return self._queued(parts, None, self._whole, **about)
        if self._rows is None:
            return super().fetch(parts, slots, **about)
        return self._queued(parts, slots, self._gather, **about)

    def _queued(self, parts: tuple[Tensor, ...], slots: Tensor | None, brings, **about) -> Transfer:
        """What asks the host for nothing is put into the stream by who asks, behind what is there: no thread
        has to be woken before the link goes on. The lane waits for it."""
        chosen = slots if slots is None else slots.to(self.device)
        ready, tokens = self._mark(), parts[0].shape[2] if slots is None else slots.shape[2]
        with torch.cuda.device(self.device), torch.cuda.stream(self._inward):
            arrived, event = brings(parts, chosen, ready), torch.cuda.Event()
            event.record()

        def work(held=(parts, chosen)) -> tuple[Tensor, ...]:
            event.synchronize()
            return arrived

        parcel = Parcel(parts, [(*part.shape[:2], tokens + 1, part.shape[3]) for part in parts])
        return self._submit(work, "device", parcel=parcel, **about)

    def _whole(self, parts: tuple[Tensor, ...], slots, ready) -> tuple[Tensor, ...]:
        """Everything held, each part in one copy, in its stored order."""
        arrived = []
        for source in map(by_token, parts):
            shape = len(source) + 1, *source.shape[1:]
            target = torch.empty(shape, dtype=source.dtype, device=self.device)
            target[:-1].copy_(source, non_blocking=True)
            arrived.append(by_head(target))
        return tuple(arrived)

    def _gather(self, parts: tuple[Tensor, ...], slots: Tensor | None, ready) -> tuple[Tensor, ...]:
        self._inward.wait_event(ready)
        return self._rows(parts, slots, self.device)

    def _collect(self, parts, slots, staged, parcel):
        """One part crosses while the next one is gathered."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._inward):
            arrived = []
            for part, source in zip(parts, staged, strict=True):
                gather((part,), slots, (source,))
                arrived.append(torch.empty_like(source, device=self.device).copy_(source, non_blocking=True))
            event = torch.cuda.Event()
            event.record()
        event.synchronize()
        self.staging.give_back(staged)
        return tuple(arrived)

    def release(self, parts) -> None:
        for part in parts:  # freed on the model's stream: the copy stream may have its memory only afterwards
            part.record_stream(torch.cuda.current_stream(self.device))

    def _mark(self):
        return torch.cuda.current_stream(self.device).record_event()

    def _to_host(self, parts, ready):
        with torch.cuda.stream(self._outward):
            self._outward.wait_event(ready)
            hosted = []
            for part in parts:
                source, count = by_token(part).contiguous(), part.shape[2]
                room = max(LEAST_ROOM, count // 8) if count > 1 else 0  # a prompt's buffer is the store's
                shape = count + room, *source.shape[1:]
                target = torch.empty(shape, dtype=part.dtype, pin_memory=True, device="cpu")
                target[:count].copy_(source, non_blocking=True)
                part.record_stream(self._outward)
                hosted.append(by_head(target[:count]))
            event = torch.cuda.Event()
            event.record()
        event.synchronize()
        return tuple(hosted)
