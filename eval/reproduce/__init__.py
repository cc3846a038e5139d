"""Reproduce: the studies that the documents stand on, made again, collected and set into tables."""
