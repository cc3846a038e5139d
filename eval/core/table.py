"""A table as data, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """head: a title for every column. body: lines of texts. title: stands above. note: stands below. words:
    how many columns, from the left, hold words; the others hold numbers."""

    head: Sequence[str]
    body: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    words: int = 1


def markdown(table: Table) -> str:
    rule = ["---"] * table.words + ["--:"] * (len(table.head) - table.words)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (table.head, rule, *table.body))
    return "\n\n".join(filter(None, (table.title, lines, table.note)))
