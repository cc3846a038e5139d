"""Errors: what one line says of an error that somebody else has raised."""

from __future__ import annotations


def first_line(error: Exception) -> str:
    """How its message begins; its kind where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def kind_and_line(error: Exception) -> str:
    """Its kind and how its message begins, in at most 160 characters."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line[:160]}"
