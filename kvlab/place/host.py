"""Host: K and V are in host memory; a fetch policy chooses what a decode step brings to the device."""

from __future__ import annotations

from dataclasses import dataclass

from ..link.base import Link
from ..parameters import check_kind, shown
from .device import Device
from .fetch import Fetch
from .pipelined import PipelinedState
from .synchronous import HostState
from .whole import Whole


@dataclass(frozen=True)
class Host(Device):
    """Hold K and V on the host and fetch the tokens that `fetch` selects.

    link: a `Link` transfers the bytes on its own threads, beside the model (`pipelined.py`). None: they are
    copied when they are needed, or, on a CPU model, only counted (`HostState`). `stats()` counts the tensors
    as host bytes, and every byte fetched or written back as moved.
    """

    fetch: Fetch | None = None
    link: object = None

    on_host = True

    def __post_init__(self):
        if self.link is not None and not isinstance(self.link, Link):
            raise TypeError(
                f"link={shown(self.link)}: expected a Link or none; kvlab.measure.machines.like(machine, "
                "model) makes one as fast as a named machine's"
            )
        if self.link is not None and not hasattr(self.link, "process"):
            raise TypeError(f"{type(self.link).__name__}.__init__ does not call that of Link")
        check_kind("fetch", self.fetch, Fetch | None, "a fetch policy such as TopK()")
        object.__setattr__(self, "fetch", Whole() if self.fetch is None else self.fetch)
        if self.link is not None and self.fetch.page is not None:
            object.__setattr__(self, "link", self.link.paged(self.fetch.page, self.fetch.fault))

    def cost(self, use) -> dict[str, float]:
        if use.kind["latent"]:
            raise ValueError("K and V are made of a latent after the cache: a host has nothing to fetch by")
        fetched, partial = self.fetch.cost(use)
        staged = use.size(fetched)
        return {
            "device": partial + use.index, "host": use.size(use.held),
            "moved": staged + use.size(1),  # the new token goes back
            "read": use.size(min(fetched, use.reads)) + partial + use.index,
            "operations": 2 * use.kind["scores"] * fetched, "staged": staged,
        }  # fmt: skip

    def start(self, layer) -> HostState:
        return HostState(self, layer) if self.link is None else PipelinedState(self, layer)
