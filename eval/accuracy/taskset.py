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

from ..core.errors import Problem, one_line

FOLDER = Path(__file__).resolve().parents[1] / "tasks"
STORIES = FOLDER / "data" / "prose"
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
    found = {path.stem for path in FOLDER.glob("*.yaml")}
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


def prepared(name: str, num_fewshot: int | None, seed: int):
    """An lm-eval task with a run's number of shots and seed, as lm-eval's own command sets them."""
    task = load(name)[name]
    shots = task.get_config("num_fewshot")
    if num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    return task


def metadata(name: str) -> dict:
    """What stands under `metadata:` in a task's YAML."""
    return {} if name == AGREEMENT else load(name)[name].config.metadata or {}


def files(name: str) -> list[Path]:
    """The files that a local task's numbers stand on; none for one of lm-eval's own."""
    if name == AGREEMENT:
        return [STORIES]
    if name not in local_names():
        return []
    data = [STORIES] if name == "prose" else sorted((FOLDER / "data").glob("*.jsonl"))
    return [*FOLDER.glob("*.yaml"), FOLDER / "rows.py", *data]


def stories() -> list[str]:
    """The original stories of `prose`, in the order of their file names (held-out text)."""
    return [file.read_text(encoding="utf-8").strip() for file in sorted(STORIES.glob("*.txt"))]
