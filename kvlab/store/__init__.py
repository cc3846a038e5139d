"""Store: in what form, and in what buffer, K and V are held."""

from .format import Exact, Float8, Int
from .growing import Growing
from .static import Static

__all__ = ["Exact", "Float8", "Growing", "Int", "Static"]
