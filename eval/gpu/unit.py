"""Unit: one part of a stage, measured in one go and stored as one cell."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST, NEXT, LAST = range(3)  # ranks: what goals hang on, what completes the tables, what is nice to know


@dataclass(frozen=True)
class Unit:
    """stage: its module. name: of the part, unique in its stage. rank: when it is measured. seconds: what it
    should take on a large GPU. given: what the stage's `measure` is called with."""

    stage: str
    name: str
    rank: int
    seconds: float
    given: dict = field(default_factory=dict)

    @property
    def task(self) -> str:
        return f"gpu:{self.stage}:{self.name}"
