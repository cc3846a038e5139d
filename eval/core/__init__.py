"""What every measurement shares: the loop, the store of cells, provenance, digests and worker processes."""
