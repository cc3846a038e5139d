"""Peers: our methods beside those of kvpress (NVIDIA), on the same tokens, in a process of each one's own."""
