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
    asked: dict[str, tuple[Store, str]] = {}  # the same -> where its samples were first met
    for source in (store, *sources):
        for name in source.files.names():
            if (other := source.read(name)) is None:
                continue
            cell = store.name(*(other[key] for key in NAMED))
            if cell not in asked and source.samples(other):
                asked[cell] = source, name
            earlier, known = first.setdefault(cell, (source, name))
            mine = other if earlier is source else earlier.read(known)
            if unlike := [key for key in NUMBERS if mine.get(key) != other.get(key)]:
                both = f"{earlier.files.at(known)} and {source.files.at(name)}"
                raise Problem(f"{both} differ: other {' and '.join(unlike)}")
    new = [cell for cell, (source, _) in first.items() if source is not store]
    for cell in {*new, *(cell for cell, (source, _) in asked.items() if source is not store)}:
        source, name = first[cell]
        logs, logged = asked.get(cell, (None, None))
        store.save(source.read(name) | {"samples": logs and logs.samples(logs.read(logged))})
    return len(new), len(first)
