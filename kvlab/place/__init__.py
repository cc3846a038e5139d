"""Place: where K and V live, and what a decode step fetches."""

from .device import Device
from .host import Fetch, Host, Whole
from .infinigen import InfiniGen
from .topk import TopK

__all__ = ["Device", "Fetch", "Host", "InfiniGen", "TopK", "Whole"]
