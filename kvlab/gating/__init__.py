"""Gating: which cache is safe on a model, measured on the model itself: `kvlab gate`, `kvlab.gate`."""

from .gate import Gate, check, gate

__all__ = ["Gate", "check", "gate"]
