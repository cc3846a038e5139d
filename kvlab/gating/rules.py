"""Rules: from intervals to verdicts."""

from __future__ import annotations

from .formats import Cost

PROMPT, DECODED, PIECES = 160, 88, 2  # tokens of a row, and rows of every kind of text: 528 are decoded
SAFE, BREAKS = 0.03, 0.3  # nats a token
SAME = 0.8  # of the most probable tokens, which few nats change where all are about equally probable
FORETOLD = 2.0  # nats by which rounded keys move the scores of a layer: more, and a format is likely to break
POINTS = 0.1  # of right answers that a keep may lose


def verdict_of(spent: Cost) -> str:
    """By nats."""
    if spent.high <= SAFE:
        return "safe" if spent.agrees >= SAME else "undecided"
    if spent.low >= BREAKS:
        return "breaks"
    return "costs" if spent.low > SAFE and spent.high < BREAKS else "undecided"


def by_answers(low: float, high: float) -> str:
    """By the 95 % interval of what is lost."""
    if high < -POINTS:
        return "breaks"
    if high < 0:
        return "costs"
    return "safe" if low > -POINTS else "undecided"
