"""Link: what carries bytes between host and device."""

from .base import Link, LinkError, Transfer
from .cuda import CudaLink
from .modelled import ModelledLink

__all__ = ["CudaLink", "Link", "LinkError", "ModelledLink", "Transfer"]
