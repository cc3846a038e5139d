"""Alike: which stored cells may stand in one table, and a line about those that may not.

Cells of one table share their whole configuration (protocol, shots, limit, digests of model and code, ...)
but for the digest of the method, which is one for each method, and, from task to task, that of the data. What
is wanted now sets the configuration; where nothing is, the newest cell does. Where that cell's method is as
it is now, so must be every other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

SPEED = "speed:"  # a speed cell's task is "speed:SUITE:CONTEXT"
WORDS = {  # keys of a configuration that readers call otherwise
    "num_fewshot": "shots",
    "task": "data",
    "method": "method's code",
}
NAMED = 2  # cells that a line names before it counts


def differences(config: dict, wanted: dict, apart: tuple[str, ...] = ()) -> dict[str, tuple]:
    """{key: (value, wanted value)} where two configurations differ, but for the keys `apart`."""
    if {**config, **dict.fromkeys(apart)} == {**wanted, **dict.fromkeys(apart)}:
        return {}
    config, wanted = (json.loads(json.dumps(one)) for one in (config, wanted))
    keys = [key for key in (*wanted, *(key for key in config if key not in wanted)) if key not in apart]
    return {key: (config.get(key), wanted.get(key)) for key in keys if config.get(key) != wanted.get(key)}


def table_of(task: str) -> str:
    """The table that a cell of this task stands in."""
    return "speed" if task.startswith(SPEED) else "accuracy"


def alike(
    cells: list[dict], wanted: Iterable = (), current: Callable[[str], str | None] = lambda method: None
) -> tuple[list[dict], dict[str, str]]:
    """(the cells that may stand in tables, {model: a line about its others}), of cells that are not studies'.

    wanted: the `Cell`s that were asked for now. current: the digest of a method's code as it is now.
    """
    kept, lines = [], {}
    asked = list(wanted)
    for model in dict.fromkeys(cell["model"] for cell in cells):
        mine = [cell for cell in cells if cell["model"] == model]
        newest = sorted(mine, key=lambda cell: cell.get("made", ""), reverse=True)
        first = [vars(cell) for cell in asked if cell.model == model] + newest
        one_model = first[0]["config"].get("model")
        settings: dict[str, dict] = {}  # table -> configuration
        data: dict[str, object] = {}  # task -> digest
        codes: dict[str, object] = {}  # method -> digest
        now = current(first[0]["method"]) == first[0]["config"].get("method")
        for cell in first:
            if cell["config"].get("model") == one_model:
                settings.setdefault(table_of(cell["task"]), cell["config"])
        fits: dict[tuple, bool] = {}
        for cell in first:
            key = id(cell["config"]), table_of(cell["task"])
            if key not in fits:
                reference = settings.get(key[1], {"model": one_model})
                fits[key] = not differences(cell["config"], reference, ("method", "task"))
            if fits[key]:
                data.setdefault(cell["task"], cell["config"].get("task"))
                if (method := cell["method"]) not in codes:  # a digest reads all of a method's code
                    codes[method] = (current(method) if now else None) or cell["config"].get("method")
        unlike = {}
        known: dict[tuple, dict] = {}  # cells that share a configuration, task or method are compared once
        for cell in mine:
            reference = settings.get(table_of(cell["task"]), cell["config"] | {"model": one_model})
            task = data.get(cell["task"], cell["config"].get("task"))
            method = codes.get(cell["method"], cell["config"].get("method"))
            key = id(cell["config"]), table_of(cell["task"]), repr(task), repr(method)
            if key not in known:
                reference = reference | {"task": task, "method": method}
                known[key] = differences(cell["config"], reference)
            if reasons := known[key]:
                unlike[f"{cell['method']} on {cell['task']}"] = reasons
            else:
                kept.append(cell)
        if unlike:
            lines[model] = f"left out, made under other settings: {said(unlike)}"
    return kept, lines


def said(unlike: dict[str, dict[str, tuple]]) -> str:
    """{name: differences} as one line; names that differ in the same way are named together."""
    groups: dict[str, list[str]] = {}
    for name, reasons in unlike.items():
        told = (f"{WORDS.get(key, key)} {word(was)}, not {word(now)}" for key, (was, now) in reasons.items())
        groups.setdefault(", ".join(told), []).append(name)
    return "; ".join(f"{named(names)} ({why})" for why, names in groups.items())


def named(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def word(value) -> str:
    """A value of a configuration, for a line."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 30 else text[:27] + "..."
