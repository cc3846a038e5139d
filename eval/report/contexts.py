"""Contexts: the cost of a context that is prefilled once for several questions."""

from __future__ import annotations

from collections.abc import Iterable

from ..accuracy.protocols import MANY, REUSE

ASKED_AGAIN = (MANY, REUSE)  # protocols under which a context has several questions
HEADS = ("contexts", "tokens prefilled per context", "seconds per context")


def texts(cells: Iterable[dict]) -> list[str]:
    """Of one method's cells, or rows, over all their tasks, as tables print it: how many contexts were
    prefilled, tokens prefilled for one, and seconds of one with all that is asked of it, the prefill that
    methods share counted whole for each; dashes where one of them was made before contexts were counted."""
    cells = list(cells)
    if not cells or not all(cell.get("contexts") for cell in cells):
        return ["–"] * len(HEADS)
    contexts = sum(cell["contexts"] for cell in cells)
    tokens = sum(cell["prefilled_tokens"] for cell in cells) / contexts
    seconds = sum(cell["seconds"] + (cell.get("prefill_seconds") or 0.0) for cell in cells) / contexts
    return [f"{contexts}", f"{tokens:.0f}", f"{seconds:.3g}"]
