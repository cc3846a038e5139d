"""Errors as lines: what the user can put right, and what failed in one cell."""

from __future__ import annotations

import traceback


class Problem(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with 2."""


class Failed(RuntimeError):
    """A cell that could not be made; `.details` holds the traceback as text."""

    def __init__(self, line: str, details: str = ""):
        super().__init__(line)
        self.details = details


def one_line(error: BaseException | str) -> str:
    """An error's text as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def describe(error: BaseException) -> tuple[str, str]:
    """(one line, traceback) of an error; the kind is named unless the message is meant for users."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + one_line(error), "".join(traceback.format_exception(error))
