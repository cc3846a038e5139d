"""Merge: the cells of several folders in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .errors import Problem
from .results import NAMED, Store

NUMBERS = ("metrics", "rows")  # what a cell found


def merge(folders: list[Path | str], store: Store, warn: Callable[[str], None]) -> tuple[int, int]:
    """Copy the cells of `folders` into `store`, with their samples; returns (how many are new there, how many
    are there).

    A cell that is there twice, with the same configuration, is one, if its numbers are equal. Raises Problem
    with both paths where they are not, before anything is written.
    """
    sources = [Store(folder, warn) for folder in folders]
    first: dict[str, tuple[Store, str]] = {}  # what a cell is named by -> where it was first met
    for source in (store, *sources):
        for name in source.files.names():
            if (other := source.read(name)) is None:
                continue
            earlier, known = first.setdefault(store.name(*(other[key] for key in NAMED)), (source, name))
            mine = other if earlier is source else earlier.read(known)
            if unlike := [key for key in NUMBERS if mine.get(key) != other.get(key)]:
                both = f"{earlier.files.at(known)} and {source.files.at(name)}"
                raise Problem(f"{both} differ: other {' and '.join(unlike)}")
    new = [(key, *where) for key, where in first.items() if where[0] is not store]
    for _, source, name in new:
        cell = source.read(name)
        store.save(cell | {"samples": source.samples(cell) or None})
    return len(new), len(first)
