"""Reproduce: run the studies behind the documents again, collect them and make their tables."""
