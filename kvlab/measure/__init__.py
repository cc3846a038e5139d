"""Measure: what watches a cache at work, or predicts one."""
