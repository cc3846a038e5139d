"""Measure: measurements and predictions of a cache at work."""
