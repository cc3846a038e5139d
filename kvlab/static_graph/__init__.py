"""Padded static buffers on a real static-graph engine (QC AI Research, n.d.; docs/sources.md).

from kvlab.static_graph import StaticGraphEngine
trace = StaticGraphEngine(model, max_length=512, policy="double").generate(ids, 200)
"""

from .cache import PaddedCache
from .engine import StaticGraphEngine
from .export import GraphSpec, graph_file
from .kv_manager import POLICIES, KVManager

__all__ = [
    "POLICIES",
    "GraphSpec",
    "KVManager",
    "PaddedCache",
    "StaticGraphEngine",
    "graph_file",
]
