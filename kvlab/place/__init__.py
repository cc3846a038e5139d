"""Place: where K and V live, and what a decode step fetches."""

from ..calibrate.fold import fold
from ..link import CudaLink, Link, LinkError, ModelledLink, Transfer
from .device import Device
from .host import Fetch, Host, Whole
from .infinigen import InfiniGen
from .ondemand import OnDemand
from .topk import TopK

__all__ = [
    "CudaLink", "Device", "Fetch", "Host", "InfiniGen", "Link", "LinkError", "ModelledLink", "OnDemand",
    "TopK", "Transfer", "Whole", "fold", "like",
]  # fmt: skip


def __getattr__(name: str):
    if name == "like":  # it measures this machine with a cache, and caches are made of places
        from ..measure.machines import like

        return like
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
