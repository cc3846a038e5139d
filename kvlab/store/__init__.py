"""Store: in what form, and in what buffer, K and V are held."""

from ..calibrate.smoothing import fold_smoothing
from .float8 import Float8
from .format import Exact, Int
from .growing import Growing
from .kivi import Kivi
from .paged import BlockPool, Paged
from .smoothed import Smoothed
from .static import Roomy, Static

__all__ = [
    "Exact", "Float8", "Growing", "Int", "Kivi", "Paged", "BlockPool", "Roomy", "Smoothed", "Static",
    "fold_smoothing",
]  # fmt: skip
