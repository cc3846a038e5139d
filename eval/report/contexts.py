"""Contexts: what a context costs that is prefilled once and asked several questions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..accuracy.protocols import MANY, REUSE

ASKED_AGAIN = (MANY, REUSE)  # protocols under which a context has several questions
HEADS = ("contexts", "tokens prefilled per context", "seconds per context")


@dataclass(frozen=True)
class Cost:
    """contexts: how many were prefilled; tokens: prefilled for one; seconds: one context with all that is
    asked of it, the prefill that methods share counted whole for each, as for a method that is alone."""

    contexts: int
    tokens: float
    seconds: float

    @property
    def texts(self) -> list[str]:
        """As tables print it, in the order of HEADS."""
        return [f"{self.contexts}", f"{self.tokens:.0f}", f"{self.seconds:.3g}"]


UNKNOWN = ["–"] * len(HEADS)  # of cells that were made before contexts were counted


def cost(cells: Iterable[dict]) -> Cost | None:
    """Of one method's cells, or rows, over all their tasks; None where one of them counted no contexts."""
    cells = list(cells)
    if not cells or not all(cell.get("contexts") for cell in cells):
        return None
    contexts = sum(cell["contexts"] for cell in cells)
    seconds = sum(cell["seconds"] + (cell.get("prefill_seconds") or 0.0) for cell in cells)
    return Cost(contexts, sum(cell["prefilled_tokens"] for cell in cells) / contexts, seconds / contexts)


def texts(cells: Iterable[dict]) -> list[str]:
    """Of one method's cells, or rows, as tables print it."""
    found = cost(cells)
    return UNKNOWN if found is None else found.texts
