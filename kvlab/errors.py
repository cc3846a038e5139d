"""Errors: what one line says of an error that somebody else has raised."""

from __future__ import annotations

from difflib import get_close_matches


def first_line(error: Exception) -> str:
    """How its message begins; its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_line(error: Exception) -> str:
    """Its kind and how its message begins, in at most 160 characters."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line[:160]}"


def nearest(name: str, known, alike: float = 0.4) -> str:
    """The known names that are most like one that is not, as the end of a sentence; "" where none is."""
    near = get_close_matches(name, list(known), n=3, cutoff=alike)
    return f", did you mean {' or '.join(near)}?" if near else ""
