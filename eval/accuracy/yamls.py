"""Own: a user's own YAML files as tasks, read before lm-eval reads them, or one line that names the error.

lm-eval leaves a file out of its index when it cannot read it, so that a task is unknown whose file is there.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path

import yaml

from kvlab.errors import nearest

from ..core.digests import imported
from ..core.errors import Problem, describe, one_line
from .boundaries import FIELD

ENDINGS = (".yaml", ".yml")
OF_MEMBERS = {"group", "task", "group_alias", "task_alias", "tag"}  # all else is a setting of the task
OF_GROUPS = OF_MEMBERS | {"aggregate_metric_list", "metadata"}
BESIDE = {"tag", "group", "task_list", "include", "class"}  # what lm-eval itself takes out of a task's YAML


def is_file(name: str) -> bool:
    """Whether a task's name is that of a YAML file, by its ending."""
    return name.endswith(ENDINGS)


def read(file: Path | str, asked: str) -> dict:
    """What a task's or a group's YAML says, what it includes among it. Raises Problem, which begins with what
    was `asked`, for a file that cannot be read, holds no task, or has a key that no task has."""
    from lm_eval.config.task import TaskConfig
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        if yaml.compose(Path(file).read_text(encoding="utf-8")) is None:
            raise Problem(f"{asked}: this YAML is empty: expected a line such as task: my_task")
        found = load_yaml(file, resolve_func=True)
    except OSError as error:  # of this file or of one that it includes
        itself = error.filename is not None and Path(error.filename) == Path(file)
        raise Problem(f"{asked}: {error.strerror if itself else one_line(error)}") from error
    except yaml.YAMLError as error:
        mark, what = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"line {mark.line + 1}: {what}" if mark else one_line(error)
        raise Problem(f"{asked}: this YAML does not parse: {where}") from error
    except Problem:
        raise
    except Exception as error:  # a function that it names cannot be imported
        raise Problem(f"{asked}: {describe(error)[0]}") from error
    if not isinstance(found.get("group", found.get("task")), str):
        raise Problem(f"{asked}: it names no task: expected a line such as task: my_task")
    if "group" not in found and "class" not in found:
        known = {field.name for field in fields(TaskConfig)} | BESIDE
        if strange := [str(key) for key in found if key not in known]:
            hint = "; it belongs under metadata:" if strange[0] == FIELD else nearest(strange[0], known, 0.7)
            raise Problem(f"{asked}: a task has no key {strange[0]!r}{hint}")
    return found


def set_by_group(said: dict, index, within: tuple[str, ...] = ()) -> list[str]:
    """The settings that a group's YAML, or one of a group within it, gives its tasks. index: lm-eval's;
    within: the groups around it."""
    from lm_eval.tasks._yaml_loader import load_yaml

    found = [key for key in said if key not in OF_GROUPS]
    for one in said["task"] if isinstance(said.get("task"), list) else ():
        member = one if isinstance(one, dict) else {"task": one}
        name = member.get("group", member.get("task"))
        entry = index.get(name) if isinstance(name, str) else None
        if entry is None and "group" in member:  # it is written here
            found += set_by_group(member, index, within)
            continue
        found += [key for key in member if key not in OF_MEMBERS]
        if entry is not None and entry.kind.name == "GROUP" and entry.yaml_path and name not in within:
            found += set_by_group(load_yaml(entry.yaml_path, resolve_func=False), index, (*within, name))
    return found


def stands_on(file: Path) -> list[Path]:
    """The files behind a YAML that lm-eval has loaded: itself, all that it includes, the modules of its
    functions with what they import, and the Python files beside each of them."""
    from lm_eval.tasks._yaml_loader import load_yaml

    file = file.resolve()
    events = yaml.parse(file.read_bytes())
    functions = [event.value for event in events if getattr(event, "tag", None) == "!function"]
    modules = [module for name in functions for module in _module_of(name, file.parent)]
    found = [path for one in (file, *modules) for path in (one, *one.parent.glob("*.py"))]
    found += [path for one in modules for path in imported(one)]
    included = load_yaml(file, resolve_func=False, recursive=False).get("include", [])
    for one in included if isinstance(included, list) else [included]:
        found += stands_on(file.parent / one)
    return found


def _module_of(function: str, folder: Path) -> list[Path]:
    """The file of a function that a YAML in this folder names, found as lm-eval does: below the folder, or by
    import. None of a module that has no file."""
    module = function.rpartition(".")[0]
    below = folder / f"{module.replace('.', '/')}.py"
    file = below if below.exists() else getattr(sys.modules.get(module), "__file__", None)
    return [Path(file).resolve()] if file else []


def name_of(found: dict) -> str:
    """The name of the task or group that a YAML holds."""
    return found.get("group", found.get("task"))


@cache
def alone(file: str) -> Path:
    """A folder in which lm-eval finds this file's task and no other; for a group, with its members beside it,
    its own folder."""
    if "group" in read(file, file):
        return Path(file).parent
    made = folder()
    (made / "task.yaml").write_text(f"include: {json.dumps(file)}\n", encoding="utf-8")
    return made


def folder() -> Path:
    """A folder, until this process ends."""
    made = Path(tempfile.mkdtemp(prefix="kvlab-task-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def check_absent(name: str, folders: Iterable[str | Path]) -> None:
    """Raises Problem if a name unknown to lm-eval is in a file of these folders that it left out."""
    says = re.compile(rf"^\s*(task|group)\s*:\s*[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
    for folder in folders:
        for file in sorted(Path(folder).rglob("*.yaml")):
            if file.stem == name or says.search(file.read_text(encoding="utf-8", errors="replace")):
                read(file, f"task {name}: {file}")
