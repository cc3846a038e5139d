"""Merge: the cells of several folders in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .comparable import differences, said
from .errors import Problem
from .results import Store

NUMBERS = ("metrics", "rows")  # what a cell found


def unlike(one: dict, other: dict) -> str:
    """How two cells differ in configuration or in what they found; "" for cells that are equal."""
    if reasons := differences(other["config"], one["config"]):
        return said({"made under other settings": reasons})
    found = [key for key in NUMBERS if differences({key: one.get(key)}, {key: other.get(key)})]
    return f"other {' and '.join(found)}" if found else ""


def merge(folders: list[Path | str], store: Store, warn: Callable[[str], None]) -> tuple[int, int]:
    """Copy the cells of `folders` into `store`, and return (how many are new there, how many are there).

    A cell that is there twice is one, if configuration and numbers are equal. Raises Problem with both paths
    where they are not, before anything is written.
    """
    sources = [Store(folder, warn) for folder in folders]
    first: dict[str, Store] = {}
    for source in (store, *sources):
        for name in source.files.names():
            if (other := source.read(name)) is None:
                continue
            earlier = first.setdefault(name, source)
            if earlier is not source and (how := unlike(earlier.read(name), other)):
                raise Problem(f"{earlier.files.at(name)} and {source.files.at(name)} differ: {how}")
    new = [(name, source) for name, source in first.items() if source is not store]
    for name, source in new:
        store.files.write(name, source.files.read(name))
    return len(new), len(first)
