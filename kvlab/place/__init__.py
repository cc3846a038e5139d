"""Place: where K and V live, and what a decode step fetches."""

from ..calibrate.fold import fold
from .device import Device
from .fetch import Fetch
from .host import Host
from .infinigen import InfiniGen
from .ondemand import OnDemand
from .quest import Quest
from .shadowkv import ShadowKV
from .topk import TopK
from .whole import Whole

__all__ = [
    "CudaLink", "Device", "Fetch", "Host", "InfiniGen", "Link", "LinkError", "ModelledLink", "OnDemand",
    "Quest", "ShadowKV", "TopK", "Transfer", "Whole", "fold", "like",
]  # fmt: skip


def __getattr__(name: str):
    """Links carry what hosts hold, and `like` measures this machine with a cache: both import this room."""
    if name == "like":
        from ..measure.machines import like

        return like
    if name in ("CudaLink", "Link", "LinkError", "ModelledLink", "Transfer"):
        from .. import link

        return getattr(link, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
