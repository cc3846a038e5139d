"""Shared by all measurements: the loop, the store of cells, provenance, digests and worker processes."""
