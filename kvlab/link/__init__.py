"""Link: transfers of bytes between host and device."""

from .base import Link, LinkError, ModelledLink, Transfer
from .cuda import CudaLink

__all__ = ["CudaLink", "Link", "LinkError", "ModelledLink", "Transfer"]
