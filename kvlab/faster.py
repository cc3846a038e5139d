"""Faster: the one seam to speed. Compiled code lives in `kvlab/fast/`; nobody else asks for it."""

from __future__ import annotations

from functools import cache


@cache
def lodger():
    """`kvlab.fast`, or None where it is not there: then every pass takes the five steps of `layer.py`."""
    try:
        from . import fast
    except ImportError:
        return None
    return fast
