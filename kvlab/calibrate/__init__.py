"""Calibrate: preparations that run a model once, before its cache exists."""
