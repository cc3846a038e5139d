"""Keep: which tokens stay."""

from .base import Keep, KeepAll
from .h2o import H2O
from .pool import Pool
from .pyramidkv import PyramidKV
from .sinks import Sinks
from .snapkv import SnapKV
from .tova import TOVA

__all__ = ["H2O", "TOVA", "Keep", "KeepAll", "Pool", "PyramidKV", "Sinks", "SnapKV"]
