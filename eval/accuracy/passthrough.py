"""lm-eval's own command line, which knows kvlab's model: `python -m eval lm-eval run --model kvlab ...`.

What is added is what its users would trip over: rows are decoded together unless `--batch_size` says
otherwise, a machine without CUDA is asked for its CPU, the answers kept by `--use_cache` are those of one
method, model and protocol (the path carries their digest), a task's own YAML may say where its contexts end,
and kvlab's own tasks are known by name.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import lm_eval.models  # noqa: F401  its own models are known before ours is
import torch
from lm_eval._cli.harness import HarnessCLI
from lm_eval.api.registry import model_registry
from lm_eval.tasks import TaskManager
from lm_eval.utils import setup_logging, simple_parse_args_string

from . import cuts
from .lm import KVLabLM, identity
from .taskset import FOLDER

NAME = "kvlab"


def run(words: list[str]) -> int:
    """Do what `lm-eval WORDS` does; returns its exit code. A ValueError is for whoever prints one line."""
    with contextlib.suppress(ValueError):  # it is registered already
        model_registry.register(NAME, target="eval.accuracy:KVLabLM")
    setup_logging()
    command = HarnessCLI()
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        arguments = command.parse_args()
        if getattr(arguments, "model", None) == NAME:
            _prepare(arguments)
        command.execute(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


def _prepare(arguments) -> None:
    """Fill in what was not given, where the model is ours."""
    given = vars(arguments)
    if given.get("batch_size") is None:
        given["batch_size"] = "auto"
    if given.get("device") is None:
        given["device"] = "cuda:0" if torch.cuda.is_available() else "cpu"
    if path := given.get("use_cache"):
        given["use_cache"] = f"{path}-{identity(**_model_arguments(given))}"
    theirs = given.get("include_path")
    KVLabLM.untils_of_tasks = _untils(given.get("tasks"), theirs)
    if not given.get("config"):  # whose own folders stand in a file
        given["include_path"] = [str(FOLDER), *([theirs] if theirs else [])]  # the later one is preferred


def _model_arguments(given: dict) -> dict:
    found = given.get("model_args") or {}
    found = simple_parse_args_string(found) if isinstance(found, str) else dict(found)
    for name in ("batch_size", "max_batch_size", "device"):
        if given.get(name) is not None:
            found.setdefault(name, given[name])
    return found


def _untils(tasks, include) -> dict[str, str]:
    """{task: the text before which its YAML says to cut}, of a user's own tasks."""
    names = tasks.split(",") if isinstance(tasks, str) else list(tasks or ())
    files = [Path(name) for name in names if name.endswith((".yaml", ".yml"))]
    folders = [str(include)] if isinstance(include, str | Path) else [str(one) for one in include or ()]
    folders += [str(file.resolve().parent) for file in files if file.is_file()]
    if not folders:
        return {}
    index = TaskManager(include_path=folders, include_defaults=False).task_index
    said = {name: (entry.cfg or {}).get("metadata") or {} for name, entry in index.items()}
    return {name: about[cuts.FIELD] for name, about in said.items() if cuts.FIELD in about}
