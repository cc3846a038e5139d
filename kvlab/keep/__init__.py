"""Keep: which tokens stay."""

from .base import Keep, KeepAll
from .h2o import H2O
from .pool import Pool
from .sinks import Sinks

__all__ = ["H2O", "Keep", "KeepAll", "Pool", "Sinks"]
