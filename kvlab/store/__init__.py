"""Store: in what form, and in what buffer, K and V are held."""

from ..calibrate.smoothing import fold_smoothing
from .calibrated import Calibrated
from .codebook import Codebook
from .exact import Exact
from .float4 import Float4
from .float8 import Float8
from .growing import Growing
from .int import Int
from .kivi import Kivi
from .nonuniform import NonUniform
from .paged import BlockPool, Paged
from .prerope import PreRope
from .ragged import Ragged, buffer_of
from .rotated import Rotated
from .skipping import Skipping
from .smoothed import Smoothed
from .static import Static

__all__ = [
    "BlockPool", "Calibrated", "Codebook", "Exact", "Float4", "Float8", "Growing", "Int", "Kivi",
    "NonUniform", "Paged", "PreRope", "Ragged", "Rotated", "Skipping", "Smoothed", "Static",
    "buffer_of", "fold_smoothing",
]  # fmt: skip
