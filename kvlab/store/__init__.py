"""Store: in what form, and in what buffer, K and V are held."""

from ..calibrate.smoothing import fold_smoothing
from .exact import Exact
from .float8 import Float8
from .growing import Growing
from .int import Int
from .kivi import Kivi
from .paged import BlockPool, Paged
from .roomy import Roomy
from .rotated import Rotated
from .smoothed import Smoothed
from .static import Static

__all__ = [
    "Exact", "Float8", "Growing", "Int", "Kivi", "Paged", "BlockPool", "Roomy", "Rotated", "Smoothed",
    "Static",
    "fold_smoothing",
]  # fmt: skip
