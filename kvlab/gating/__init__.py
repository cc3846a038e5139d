"""Gating: which cache is safe on a model, measured on the model itself: `kvlab gate`, `kvlab.gate`."""

from .gate import INTERRUPTED, Gate, check, gate

__all__ = ["INTERRUPTED", "Gate", "check", "gate"]
