"""Finding tasks by name: the local ones without a network, lm-eval's own ones when asked for.

Local tasks are the YAML files in `eval/tasks`, indexed in a millisecond. Any other name is looked up
in lm-eval's index (four seconds) and its data set is loaded by lm-eval, from the hub or its cache.
"""

from __future__ import annotations

import contextlib
import difflib
import io
from functools import cache
from pathlib import Path

from .machine import HERE, Problem, digest, one_line

FOLDER = HERE / "tasks"
LOCAL = ("recall", "needle", "chain", "cloze", "prose", "recall_em", "needle_em", "chain_em")
AGREEMENT = "agreement"  # not an lm-eval task: see agreement.py


@cache
def _manager(built_in: bool):
    from lm_eval.tasks import TaskManager

    if built_in:
        return TaskManager()
    return TaskManager(include_path=str(FOLDER), include_defaults=False)


def local_names() -> list[str]:
    """Names of the local tasks, the default ones first and in their order."""
    found = set(_manager(False).all_subtasks)
    return [name for name in LOCAL if name in found] + sorted(found - set(LOCAL))


def check(names: list[str]) -> list[str]:
    """The names, groups and tags of lm-eval replaced by their tasks. Raises Problem for unknown ones."""
    local, checked = local_names(), []
    for name in names:
        if name == AGREEMENT or name in local:
            checked.append(name)
            continue
        index = _manager(True)
        if name not in index.all_tasks:
            near = difflib.get_close_matches(name, [AGREEMENT, *local, *index.all_tasks], 4, 0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise Problem(f"--tasks: unknown task {name!r}{hint}; local tasks: {', '.join(local)}")
        checked += load(name)
    return list(dict.fromkeys(checked))


def load(name: str) -> dict:
    """{task name: lm-eval Task}; raises Problem when its data cannot be had."""
    local = name in local_names()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return _manager(not local).load([name])["tasks"]
    except Exception as error:
        if local:
            raise Problem(f"task {name!r} cannot be loaded: {one_line(error)}") from error
        raise Problem(
            f"task {name!r}: its data set is not on this machine and could not be fetched "
            f"({type(error).__name__}); go online once, or use the local tasks"
        ) from error


@cache
def task_digest(name: str) -> str:
    """Digest of a local task's definitions and data; a built-in task stands for itself."""
    if name == AGREEMENT:
        return digest([FOLDER / "data" / "prose"])
    if name not in local_names():
        return name
    paths = [path for path in FOLDER.glob("*") if path.suffix in (".py", ".yaml")]
    data = FOLDER / "data"
    return digest(paths + (([data / "prose"]) if name == "prose" else list(data.glob("*.jsonl"))))


def stories() -> list[str]:
    """The original stories of `prose`, in the order of their file names (held-out text)."""
    files: list[Path] = sorted((FOLDER / "data" / "prose").glob("*.txt"))
    return [file.read_text(encoding="utf-8").strip() for file in files]
