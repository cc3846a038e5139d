"""Checks for the exercises: `check.name(answer)` says correct, incorrect with the likely mistake, or not
attempted. One file for each chapter; `exercise.py` holds what they share."""

from .ch01 import decode_flops, greedy, growth
from .ch02 import append, memory, next_position
from .ch05 import design, heavy_hitters, sink_slots

__all__ = [
    "append", "decode_flops", "design", "greedy", "growth", "heavy_hitters", "memory", "next_position",
    "sink_slots",
]  # fmt: skip
