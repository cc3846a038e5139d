"""ModelledLink: a link of stated speed, for machines that are not here."""

from __future__ import annotations

import math

from .base import Link


class ModelledLink(Link):
    """A link of stated speed: the data are really copied, and arrive when the bandwidth allows.

    bandwidth: bytes per second in either direction. latency: seconds that every transfer pays. page: bytes;
    if given, only whole pages cross, and every page pays the latency (unified memory's faults).
    """

    def __init__(self, bandwidth: float, latency: float = 10e-6, page: int | None = None, timeout=60.0):
        super().__init__(timeout)
        if not isinstance(bandwidth, int | float) or not 0 < bandwidth < math.inf:
            raise ValueError(f"bandwidth={bandwidth!r}: expected a positive number of bytes per second")
        if not isinstance(latency, int | float) or not 0 <= latency < math.inf:
            raise ValueError(f"latency={latency!r}: expected seconds, 0 or more")
        if page is not None and (not isinstance(page, int) or page < 1):
            raise ValueError(f"page={page!r}: expected a positive number of bytes")
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
