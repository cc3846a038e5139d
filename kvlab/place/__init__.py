"""Place: where K and V live, and what a decode step fetches."""

from ..calibrate.fold import fold
from ..link import CudaLink, Link, LinkError, ModelledLink, Transfer
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
    "Quest", "ShadowKV", "TopK", "Transfer", "Whole", "fold",
]  # fmt: skip
