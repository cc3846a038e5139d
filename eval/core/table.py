"""A table as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[str], body: Iterable[Sequence[str]], note: str = "", words: int = 1) -> str:
    """head: a title for every column. body: lines of texts. note: a line below. words: the number of columns,
    from the left, that hold words; the others hold numbers."""
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *body))
    return f"{lines}\n\n{note}" if note else lines
