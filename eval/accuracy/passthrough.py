"""lm-eval's own command line, which knows kvlab's model: `python -m eval lm-eval run --model kvlab ...`.

What is added is what its users would trip over: rows are decoded together unless `--batch_size` says
otherwise, a machine without CUDA is asked for its CPU, `--use_cache` is refused, a task's own YAML may say
where its contexts end, kvlab's own tasks are known by name, and tasks that make their rows learn where the
model's tokenizer is. An error in a user's own files is one line. All this also holds for the file of
`--config`.
"""

from __future__ import annotations

import fnmatch
import glob
import sys
from dataclasses import fields
from pathlib import Path

import lm_eval.models  # noqa: F401  its own models are known before ours is
import torch
from lm_eval._cli.harness import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager
from lm_eval.utils import setup_logging

from kvlab.errors import nearest
from kvlab.models import source_of

from ..core import study
from ..core.errors import Problem
from . import boundaries, settings, yamls
from .lm import KEPT, KVLabLM
from .protocols import INSIDE
from .taskset import FOLDER, local_names

NAME = "kvlab"
OWN = ("batch_size", "max_batch_size", "device")  # what lm-eval hands to a model beside --model_args


def run(words: list[str]) -> int:
    """Do what `lm-eval WORDS` does; returns its exit code. A ValueError is for the caller to print in one
    line."""
    setup_logging()
    command = HarnessCLI()
    before, sys.argv = sys.argv, ["lm-eval", *words]
    try:
        arguments = command.parse_args()
        if hasattr(arguments, "include_path"):
            _prepare(arguments)
        command.execute(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


def _prepare(arguments) -> None:
    """Fill in what was not given, on the command line or in the file of --config, and look at what was."""
    given = _given(arguments)
    theirs = given.get("include_path") or []
    theirs = [theirs] if isinstance(theirs, str) else [str(folder) for folder in theirs]
    filled = {"include_path": [str(FOLDER), *theirs]}  # the later one is preferred
    if arguments.command == "run":
        tasks = given.get("tasks") or []
        tasks = [one for name in ([tasks] if isinstance(tasks, str) else tasks) for one in name.split(",")]
        KVLabLM.untils_of_tasks, KVLabLM.shots_of_tasks = _of_yaml(tasks, theirs, given.get("num_fewshot"))
        ours, others = _asked(tasks)
        metadata = settings.lengths(tasks, _dictionary(given.get("metadata")))
        settings.check(ours, others, metadata)
        filled["metadata"] = _tokenizer(given, ours) | metadata
        if given.get("model") == NAME:
            filled |= _of_our_model(given)
            _check_cuts(tasks, filled["include_path"], _dictionary(given.get("model_args")))
    vars(arguments).update(filled)


def _given(arguments) -> dict:
    """What the file of --config says, and above it what the command line does, as lm-eval takes them
    together. Raises Problem for a file that holds something else."""
    words = {name: value for name, value in vars(arguments).items() if value or value == 0}
    if not (file := words.get("config")):
        return words
    try:
        found = EvaluatorConfig.load_yaml_config(file)
    except TypeError as error:
        raise Problem(f"--config {file}: expected lines such as tasks: [recall]") from error
    known = [field.name for field in fields(EvaluatorConfig)]
    if strange := [str(name) for name in found if name not in known]:
        raise Problem(f"--config {file}: unknown {strange[0]!r}{nearest(strange[0], known)}")
    return found | words


def _of_our_model(given: dict) -> dict:
    """What lm-eval is told beside what its user says, where the model is ours. Its protocol is named among
    the arguments, which lm-eval prints above its table."""
    about = _dictionary(given.get("model_args"))
    for name in OWN:
        if name in about:
            raise Problem(f"--model_args {name}={about[name]}: lm-eval has an option for it: --{name}")
    filled = {"model_args": {"protocol": INSIDE, **about}}
    if said := given.get("gen_kwargs"):
        filled["gen_kwargs"] = settings.generation(_dictionary(said), "--gen_kwargs")
    if given.get("batch_size") is None:
        filled["batch_size"] = "auto"
    if given.get("device") is None:
        filled["device"] = "cuda:0" if torch.cuda.is_available() else "cpu"
    if given.get("use_cache"):
        raise Problem(f"--{KEPT}")
    return filled


def _check_cuts(tasks: list[str], folders: list[str], about: dict) -> None:
    """Problem, before a model is loaded, for a task whose prompts are to be cut and have no cut. A group's
    members and a pattern's are not looked at: they are refused when they are reached."""
    protocol, until = about.get("protocol", INSIDE), about.get(boundaries.FIELD)
    boundaries.check_until(until, protocol, tasks)
    if protocol == INSIDE or until is not None:
        return
    named = {yamls.name_of(one) for one in _in_files(tasks) if "group" not in one}
    strangers = {name for name in (*tasks, *named) if not yamls.is_file(name) and not boundaries.known(name)}
    for name in sorted(strangers - KVLabLM.untils_of_tasks.keys()):
        if name in named or name in TaskManager(include_path=folders).all_subtasks:
            boundaries.rule_of(name)


def _tokenizer(given: dict, ours: list[str]) -> dict:
    """Where tasks that make their rows find the model's tokenizer; Problem where one of ours does not."""
    about = _dictionary(given.get("model_args"))
    model = about.get("pretrained") or about.get("model")
    found = about.get("tokenizer") or (source_of(model) if given.get("model") == NAME else model)
    needles = [name for name in ours if name.startswith(settings.MADE)]
    if needles and not found and "tokenizer" not in _dictionary(given.get("metadata")):
        raise Problem(f"--tasks {needles[0]}: name a tokenizer with --metadata tokenizer=FOLDER")
    return {"tokenizer": str(found)} if found else {}


def _dictionary(said) -> dict:
    """Arguments that are a text or a dictionary already."""
    return study.arguments(said) if isinstance(said, str) else dict(said or {})


def _asked(tasks: list[str]) -> tuple[list[str], list[str]]:
    """(our own tasks among these, which may be patterns; the names and patterns of other tasks)."""
    local = local_names()
    ours = [one for name in tasks for one in fnmatch.filter(local, name)]
    return ours, [name for name in tasks if not fnmatch.filter(local, name)]


def _in_files(tasks: list[str]) -> list[dict]:
    """What the YAML files among these names, or patterns, say."""
    files = [file for name in tasks if yamls.is_file(name) for file in glob.glob(name)]
    return [yamls.read(file, f"--tasks {file}") for file in files]


def _of_yaml(tasks: list[str], folders: list[str], shots: int | None) -> tuple[dict, dict]:
    """({task: the text before which its YAML says to cut}, {task: how many examples come before its items, if
    `shots` are asked for; None: of lm-eval's own ones}), of a user's own tasks, named as files or in these
    folders. Raises Problem for files that are wanted and cannot be used."""
    if len(tasks) == 1 and Path(tasks[0]).is_dir():
        tasks = [f"{tasks[0]}/*.yaml"]
    found = _in_files(tasks)
    index = TaskManager(include_path=folders, include_defaults=False).task_index if folders else {}
    for name in tasks:
        wanted = fnmatch.filter(index, name)
        if not wanted and not yamls.is_file(name):
            yamls.check_absent(name, folders)
        entries = [index[one] for one in wanted if index[one].yaml_path is not None]
        found += [yamls.read(entry.yaml_path, f"task {entry.name}: {entry.yaml_path}") for entry in entries]
    untils = {
        yamls.name_of(one): settings.context_until(yamls.name_of(one), one.get("metadata")) for one in found
    }
    examples = {yamls.name_of(one): shots or one.get("num_fewshot") or 0 for one in found}
    for name, entry in index.items():  # groups and tags have members that were not named
        said = entry.cfg or {}
        about = said.get("metadata")
        untils.setdefault(name, about.get(boundaries.FIELD) if isinstance(about, dict) else None)
        examples.setdefault(name, shots or said.get("num_fewshot") or 0)
    return {name: until for name, until in untils.items() if until is not None}, {None: shots or 0} | examples
