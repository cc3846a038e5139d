"""Named: the description of a method of the literature, for every list of methods."""

from __future__ import annotations

from dataclasses import dataclass, field

WHOLE = "every token, exact"
ROUNDED = "every token, rounded"
CHOSEN = "some tokens, the rest dropped"
HOST = "every token, on the host"
OWN = "of your own"
COMMON = ("chunk", "every", "renumber", "merge", "turns")  # parameters that keeps have in common, see `Keep`


@dataclass(frozen=True)
class Entry:
    """One name in the table of methods.

    summary: one sentence. paper: authors and year, as in docs/sources.md; empty if there is none.
    same: parameters at which it is lossless, in prompts of up to 80 tokens (None: there are none); less:
    parameters at which it is lossy (None: it never is). look: colour, marker and line, as in "green h -"
    (`plots.py`). technique: the nearest one of serving engines (bill/flags.json). takes: its parameters of
    `COMMON`. given: fixed parameters of the class.
    """

    name: str
    summary: str
    family: str = OWN
    paper: str = ""
    same: str | None = None
    less: str | None = None
    look: str = ""
    technique: str = ""
    takes: tuple[str, ...] = COMMON
    given: dict[str, object] = field(default_factory=dict)


def named(name: str, summary: str, paper: str = "", *, same: str = "budget=1", **others):
    """Decorator: enter a keep as a method of this name (see `Entry`)."""

    def enter(kind):
        kind.entries = (*vars(kind).get("entries", ()), Entry(name, summary, CHOSEN, paper, same, **others))
        return kind

    return enter
