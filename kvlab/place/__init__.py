"""Place: where K and V live, and what a decode step fetches."""

from .cuda import CudaLink
from .device import Device
from .fold import fold
from .host import Fetch, Host, Whole
from .infinigen import InfiniGen
from .link import Link, LinkError, ModelledLink, Transfer
from .machines import like
from .ondemand import OnDemand
from .topk import TopK

__all__ = [
    "CudaLink", "Device", "Fetch", "Host", "InfiniGen", "Link", "LinkError", "ModelledLink", "OnDemand",
    "TopK", "Transfer", "Whole", "fold", "like",
]  # fmt: skip
