"""Host: K and V live in host memory; a fetch policy says what a decode step brings to the device."""

from __future__ import annotations

from dataclasses import dataclass

from .device import Device
from .fetch import Fetch
from .synchronous import HostState
from .whole import Whole


@dataclass(frozen=True)
class Host(Device):
    """Hold K and V on the host and fetch what `fetch` selects.

    link: what carries the bytes. None: they are copied when they are needed, or, on a CPU model, only
    counted (`synchronous.py`). A `Link`: transfers run on the link's own threads, beside the model
    (`link/pipelined.py`). `stats()` counts the tensors as host bytes, and every byte fetched or written back
    as moved.
    """

    fetch: Fetch | None = None
    link: object = None

    on_host = True

    def __post_init__(self):
        if self.link is not None and not hasattr(self.link, "fetch"):
            raise TypeError(
                f"link={self.link!r}: expected a Link or none; kvlab.place.like(machine, model) makes one as "
                "fast as a named machine's"
            )
        object.__setattr__(self, "fetch", self.fetch or Whole())
        if self.link is not None and self.fetch.page is not None:
            object.__setattr__(self, "link", self.link.paged(self.fetch.page, self.fetch.fault))

    def start(self, layer) -> HostState:
        return HostState(self, layer) if self.link is None else self.link.start(self, layer)
