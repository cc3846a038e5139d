"""Keep: which tokens stay."""

from .adakv import AdaKV
from .base import Keep, KeepAll
from .duo import Duo
from .expected import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .keynorm import KeyNorm
from .kvzap import KVzap
from .kvzip import KVzip
from .lagkv import LagKV
from .pool import Pool
from .pyramidkv import PyramidKV
from .random import Random
from .rkv import RKV
from .sinks import Sinks
from .snapkv import SnapKV
from .tova import TOVA

__all__ = [
    "H2O", "RKV", "TOVA", "AdaKV", "Duo", "ExpectedAttention", "KVzap", "KVzip", "Keep", "KeepAll",
    "KeyDiff", "KeyNorm", "LagKV", "Pool", "PyramidKV", "Random", "Sinks", "SnapKV",
]  # fmt: skip
