"""Checks for the exercises: `check.name(answer)` says correct, incorrect with the likely mistake, or not
attempted. One file for each chapter; `exercise.py` holds what they share."""

from .ch01 import decode_flops, greedy, growth
from .ch02 import append, memory, next_position
from .ch03 import policy, real_slots, window_start
from .ch04 import form, quantize, unpack
from .ch05 import design, heavy_hitters, sink_slots
from .ch06 import link_needed, schedule, slow_link
from .ch07 import dial, how_many, rehearse
from .ch08 import fair, norm_score, pareto

__all__ = [
    "append",
    "decode_flops",
    "design",
    "dial",
    "fair",
    "form",
    "greedy",
    "growth",
    "heavy_hitters",
    "how_many",
    "link_needed",
    "memory",
    "next_position",
    "norm_score",
    "pareto",
    "policy",
    "quantize",
    "real_slots",
    "rehearse",
    "schedule",
    "sink_slots",
    "slow_link",
    "unpack",
    "window_start",
]
