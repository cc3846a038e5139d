"""Cluster: a sweep's jobs on Ray, which starts processes, finds nodes and reports those that died."""
