"""Measure: what measures a cache at work, or predicts one."""
