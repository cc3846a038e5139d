"""Errors as lines: those that the user can correct, and failures of one cell."""

from __future__ import annotations

import errno
import os
import traceback

from kvlab.errors import shown

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, a share of one, the length that a file may have


class Problem(ValueError):
    """Something the user can put right; the command line prints it as one line and exits with 2."""


class Failed(RuntimeError):
    """A cell that could not be made; `.details` holds the traceback as text."""

    def __init__(self, line: str, details: str = ""):
        super().__init__(line)
        self.details = details


class Terminated(KeyboardInterrupt):
    """SIGTERM: the run ends as it does after Ctrl-C."""


def one_line(error: BaseException | str) -> str:
    """An error's text as one line of at most 300 characters; of an OSError, its file and the reason."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        named = isinstance(error.filename, str | os.PathLike)
        text = f"{error.filename}: {error.strerror}" if named else error.strerror
    text = shown(" ".join(text.split())) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."


def describe(error: BaseException) -> tuple[str, str]:
    """(one line, traceback) of an error; the kind is named unless the message is meant for users."""
    told = isinstance(error, ValueError) or getattr(error, "strerror", None)
    kind = "" if told else f"{type(error).__name__}: "
    return kind + one_line(error), "".join(traceback.format_exception(error))


def no_room(error: BaseException | None) -> bool:
    """Does it come from a file that had no room, whatever others made of that error?"""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False
