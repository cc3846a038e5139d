"""Keep: which tokens stay."""

from .adakv import AdaKV
from .base import Keep, KeepAll
from .cur import CUR
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

__all__ = [  # in the order in which methods are listed
    "Keep", "KeepAll", "Sinks", "H2O", "SnapKV", "TOVA", "PyramidKV", "KeyDiff", "KeyNorm", "KVzip", "LagKV",
    "CUR", "ExpectedAttention", "RKV", "Random", "AdaKV", "Duo", "KVzap", "Pool",
]  # fmt: skip
