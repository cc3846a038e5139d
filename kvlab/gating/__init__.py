"""Gating: which cache is safe on a model, asked of the model itself: `kvlab gate`, `kvlab.gate`."""

from .gate import Gate, gate

__all__ = ["Gate", "gate"]
