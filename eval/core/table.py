"""A table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], body: Iterable[Sequence[str]], note: str = "") -> str:
    """head: a title for every column, of which the first holds words, the others numbers. body: lines of
    texts. note: a line below."""
    rule = ["---", *["--:"] * (len(head) - 1)]
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
    return f"{lines}\n\n{note}" if note else lines
