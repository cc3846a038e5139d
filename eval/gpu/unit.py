"""Unit: one part of a stage, measured in one go and stored as one cell."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST, NEXT, LAST = range(3)  # ranks: the most telling, to complete the tables, nice to know
TOGETHER = 5  # methods of a unit: where its process dies, it takes no more of a table along


@dataclass(frozen=True)
class Unit:
    """stage: its name. name: of the part, unique in its stage. rank: when it is measured. seconds: what it
    should take on a large GPU. given: what the stage's `measure` is called with."""

    stage: str
    name: str
    rank: int
    seconds: float
    given: dict = field(default_factory=dict)

    @property
    def task(self) -> str:
        return f"gpu:{self.stage}:{self.name}"


def groups(names: list[str]) -> list[list[str]]:
    """The names, at most `TOGETHER` at a time."""
    return [list(names[start : start + TOGETHER]) for start in range(0, len(names), TOGETHER)]
