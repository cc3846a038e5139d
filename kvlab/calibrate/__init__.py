"""Calibrate: what runs a model once, before its cache exists."""
