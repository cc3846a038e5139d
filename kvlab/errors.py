"""Errors: one-line summaries of errors raised elsewhere."""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from io import TextIOWrapper

# What a terminal obeys, and halves of characters, which nothing can write.
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(text: str) -> str:
    """A text from elsewhere, what steers a terminal written out."""
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_anything() -> None:
    """What the terminal's encoding lacks is printed as a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def first_line(error: Exception) -> str:
    """The first line of its message; its kind if it has none."""
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])


def kind_and_line(error: Exception) -> str:
    """Its kind and the first line of its message, in at most 160 characters."""
    kind, line = type(error).__name__, first_line(error)
    return kind if line == kind else f"{kind}: {line[:160]}"


def nearest(name: str, known, alike: float = 0.4) -> str:
    """The known names most similar to an unknown one, as the end of a sentence; "" if none is similar."""
    near = get_close_matches(name, list(known), n=3, cutoff=alike)
    return f", did you mean {' or '.join(near)}?" if near else ""
