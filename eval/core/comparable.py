"""Comparable: which stored cells are in one table, and a line about those that are in none.

Cells of one table share their whole configuration (shots, limit, dtype, ...) except the protocol, which has
its own columns, the digest of your own method, one for each method, and, from task to task, the digest of the
data. The cells wanted now set the configuration; if none are, the newest cell does. Accuracies under other
settings have tables of their own, and so has speed on another device, machine, or in another dtype. Cells of
another model, other code or other data are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

SPEED = "speed:"  # a speed cell's task is "speed:SUITE:CONTEXT"
SIDES = ("protocol", "evict")  # have columns of their own in a table
PLACES = ("device", "dtype")  # what accuracy and speed of one table share
MACHINE = "machine"  # that times, in a speed cell's configuration
DIGESTS = ("model", "code", "method", "task")  # of what a cell was made of
WORDS = {  # keys of a configuration that readers call otherwise
    "num_fewshot": "shots",
    "task": "data",
    "method": "method's code",
}
NAMED = 2  # cells that a line names before it counts


def differences(config: dict, wanted: dict, apart: tuple[str, ...] = ()) -> dict[str, tuple]:
    """{key: (value, wanted value)} where two configurations differ, except in the keys `apart`."""
    if {**config, **dict.fromkeys(apart)} == {**wanted, **dict.fromkeys(apart)}:
        return {}
    config, wanted = (json.loads(json.dumps(one)) for one in (config, wanted))
    keys = [key for key in (*wanted, *(key for key in config if key not in wanted)) if key not in apart]
    return {key: (config.get(key), wanted.get(key)) for key in keys if config.get(key) != wanted.get(key)}


def own_settings(cell: dict, config: dict) -> dict:
    """The settings that give a cell a table of its own beside that of `config`: {key: its value}."""
    free = SIDES + DIGESTS
    return {
        key: was
        for key, (was, _) in differences(cell["config"], config, free).items()
        if key in (*PLACES, MACHINE) or not cell["task"].startswith(SPEED)
    }


def comparable(
    cells: list[dict], wanted: Iterable = (), any_code: bool = False
) -> tuple[list[dict], dict[str, str]]:
    """(the cells that may be in tables, {model: a line about its others}), of cells that are not studies'.

    wanted: the `Cell`s that were asked for now. any_code: cells of other code are shown beside them, each
    marked by `"other_code": True`. A cell's `"apart"` says what its table's settings are beside those of the
    first table.
    """
    kept, lines, asked = {}, {}, list(wanted)
    for model in dict.fromkeys(cell["model"] for cell in cells):
        mine = [cell for cell in cells if cell["model"] == model]
        newest = sorted(mine, key=lambda cell: cell.get("made", ""), reverse=True)
        first = [vars(cell) for cell in asked if cell.model == model] + newest
        digest = first[0]["config"].get("model")
        settings = {}  # (what, name) -> configuration of the table, digest of the task, digest of the method
        for cell in first:
            config, speed = cell["config"], cell["task"].startswith(SPEED)
            if config.get("model") != digest:
                continue
            shared = settings.setdefault(("table", speed), config)
            free = (*DIGESTS[2:], *SIDES, *own_settings(cell, shared), *(["code"] if any_code else []))
            if not differences(config, shared, free):
                settings.setdefault(("task", cell["task"]), config.get("task"))
                settings.setdefault(("method", cell["method"]), config.get("method"))
        unlike = {}
        for cell in mine:
            config = cell["config"]
            reference = settings.get(("table", cell["task"].startswith(SPEED)), config | {"model": digest})
            task = settings.get(("task", cell["task"]), config.get("task"))
            method = settings.get(("method", cell["method"]), config.get("method"))
            reasons = differences(config, reference | {"task": task, "method": method})
            own = own_settings(cell, reference)
            if not reasons.keys() - own.keys() - {*SIDES, *(["code"] if any_code else [])}:
                one = cell | {"apart": own} | ({"other_code": True} if "code" in reasons else {})
                place = (model, cell["method"], cell["task"], *map(config.get, SIDES), str(own))
                kept[place] = max(kept.get(place, one), one, key=_worth)
            else:
                unlike[f"{cell['method']} on {cell['task']}"] = reasons
        if unlike:
            lines[model] = f"left out, made under other settings: {said(unlike)}"
    return list(kept.values()), lines


def _worth(cell: dict) -> tuple:
    """Of two cells in one place of a table the one of today's code is shown, then the newer one."""
    return "other_code" not in cell, cell.get("made", "")


def said(unlike: dict[str, dict[str, tuple]]) -> str:
    """{name: differences} as one line; names that differ in the same way are named together."""
    groups: dict[str, list[str]] = {}
    for name, reasons in unlike.items():
        told = (f"{WORDS.get(key, key)} {word(was)}, not {word(now)}" for key, (was, now) in reasons.items())
        groups.setdefault(", ".join(told), []).append(name)
    return "; ".join(f"{named(names)} ({why})" for why, names in groups.items())


def named(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def word(value) -> str:
    """A value of a configuration, for a line."""
    text = "none" if value is None else str(value)
    return text if len(text) <= 30 else text[:27] + "..."
