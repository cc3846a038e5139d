"""Alike: which stored cells may stand in one table, and a line about those that may not.

Cells of one table share their whole configuration (protocol, shots, limit, digests of model and code, ...)
but for the digest of a method of your own, which is one for each method, and, from task to task, that of the
data. What is wanted now sets the configuration; where nothing is, the newest cell does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

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


def comparable(
    cells: list[dict], wanted: Iterable = (), any_code: bool = False
) -> tuple[list[dict], dict[str, str]]:
    """(the cells that may stand in tables, {model: a line about its others}), of cells that are not studies'.

    wanted: the `Cell`s that were asked for now. any_code: cells of other code stand beside them, each marked
    by `"other_code": True`.
    """
    kept, lines, asked = [], {}, list(wanted)
    for model in dict.fromkeys(cell["model"] for cell in cells):
        mine = [cell for cell in cells if cell["model"] == model]
        newest = sorted(mine, key=lambda cell: cell.get("made", ""), reverse=True)
        first = [vars(cell) for cell in asked if cell.model == model] + newest
        settings = {}  # (what, name) -> configuration of the table, digest of the task, digest of the method
        for cell in first:
            config, table = cell["config"], table_of(cell["task"])
            if config.get("model") != first[0]["config"].get("model"):
                continue
            shared = settings.setdefault(("table", table), config)
            if not differences(config, shared, ("method", "task", *(["code"] if any_code else []))):
                settings.setdefault(("task", cell["task"]), config.get("task"))
                settings.setdefault(("method", cell["method"]), config.get("method"))
        unlike = {}
        for cell in mine:
            config = cell["config"]
            reference = settings.get(
                ("table", table_of(cell["task"])), config | {"model": first[0]["config"].get("model")}
            )
            task = settings.get(("task", cell["task"]), config.get("task"))
            method = settings.get(("method", cell["method"]), config.get("method"))
            reasons = differences(config, reference | {"task": task, "method": method})
            if any_code and reasons.keys() == {"code"}:
                kept.append(cell | {"other_code": True})
            elif reasons:
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
