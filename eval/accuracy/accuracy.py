"""The measurement `accuracy`: a cell is one method on one task of lm-eval, or its agreement with full."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvlab.measure.host import cores

from .. import PACKAGE
from ..cluster.options import Pooled, pieces
from ..core import comparable, workers
from ..core.errors import Failed, Problem
from ..core.measurement import USUAL, Cell, flag, natural, option, rows_at_once
from ..core.numbers import shown
from ..core.results import Store
from ..core.study import arguments
from . import boundaries, data, kept, settings, taskset, yamls
from .protocols import EVICT, INSIDE, PROTOCOLS, REUSE, checked, eviction
from .samples import NONE, SHORT, WHOLE

NOT_KEPT = "its first prompt was not kept: measure again in another --out, with --log-samples whole"
# How long a task takes beside others on two cores, at most times; what takes longest goes first.
WORK = {
    "prose": 7.0, "chain": 4.0, "cloze": 3.5, "needle_em": 3.5, "needle": 3.0, "agreement": 2.5,
    "recall": 2.0,
}  # fmt: skip


@dataclass(kw_only=True)
class Accuracy(Pooled):
    """Methods that miss a task are scored on it together, since they share their prefills; tasks go to worker
    processes, the longest first."""

    name, several = "accuracy", True
    about = "measure lm-eval tasks and agreement with the full cache, then write the report"
    maker = f"{PACKAGE}.accuracy.worker"

    tasks: tuple[str, ...] = option(
        "names of local tasks, lm-eval tasks, or 'agreement'", (), many=True, metavar="TASK"
    )
    batch_size: int = option("rows to decode together (default: 64)", USUAL, type=rows_at_once)
    engine: str | None = option(
        "engine of the decode steps; compiled takes at most 8 rows (default: graph on a GPU, else eager)",
        choices=["eager", "compiled", "graph"],
    )
    protocol: str = option(
        f"one or several of {', '.join(PROTOCOLS)}: compress the prompt with its question inside, or its "
        f"context before the question is known (default: {INSIDE})",
        INSIDE,
        many=True,
        metavar="PROTOCOL",
    )
    evict: str | None = option(
        "after the prompt, hold new tokens on top of the budget (once) or evict at every step (default: "
        "every-step under question-inside, else once)",
        choices=list(EVICT),
    )
    context_until: str | None = option(
        "text at which the question begins, for tasks that do not say where", metavar="TEXT"
    )
    include_path: str | None = option("folder of your own lm-eval tasks (YAML)", metavar="FOLDER")
    data: tuple[str, ...] = option(
        "file of rows that a task reads instead of its own data set", (), nargs="+", metavar="TASK=FILE.jsonl"
    )
    metadata: str = option("settings for the tasks, as name=value,name=value or JSON", "")
    device_map: str | None = option(
        "spread the model over devices, CPU and disk: auto, or a JSON file {module: device}"
    )
    tp: bool = flag("split the model's heads among the processes of torchrun")
    model_args: str = option("more arguments for the model, such as max_length=TOKENS", "")
    gen_kwargs: str = option("lm-eval's options of generation, such as max_gen_toks=32", "")
    apply_chat_template: bool = flag("put prompts into the tokenizer's chat template")
    system_instruction: str | None = option("text to put before every prompt", metavar="TEXT")
    fewshot_as_multiturn: bool = flag("give shots as turns of the chat")
    confirm_run_unsafe_code: bool = flag("run programs that the model writes, for tasks that test them")
    log_samples: str = option(
        "the record of every document beside the cells: short: question, answer, evidence (default); "
        "whole: its prompt, too; none",
        SHORT,
        nargs="?",
        const=WHOLE,
        choices=[SHORT, WHOLE, NONE],
    )
    samples: str = option(
        'numbers of the documents to ask, instead of the first: {"TASK": [0, 7]}, or a file of that',
        "",
    )
    write_out: bool = flag("show the first prompt of every task")
    shard: str | None = option(
        "make the I-th of N parts of the cells, for jobs that share --out", metavar="I/N"
    )
    num_fewshot: int | None = option("number of shots, for tasks that do not fix it", type=natural)
    seed: int = option("seed for the choice of shots (default: 1234)", 1234, type=natural)
    jobs: int | None = option("processes; 0: only this one (default: 2 for a small model)", type=natural)

    sources: taskset.Sources = field(default=taskset.NONE, init=False, repr=False)
    _partial: Path | None = field(default=None, init=False, repr=False)  # the folder of finished batches
    _names: dict = field(default_factory=dict, init=False, repr=False)  # (task, method) -> its cell's file

    @property
    def threads(self) -> int | None:
        return 1 if self.small() else None

    def check(self) -> None:
        super().check()
        self._check_options()
        eviction(checked("protocol", self.protocol, PROTOCOLS), self.evict)
        if self.protocol == REUSE:
            from . import reuse

            for spec in self.specs:
                reuse.check(spec)
        self.tasks = tuple(taskset.check(self.tasks or taskset.defaults(self.protocol), self.sources))
        self._check_told()
        for task in self.tasks:
            if not self.confirm_run_unsafe_code and taskset.runs_programs(task, self.sources):
                raise Problem(
                    f"task {task}: it runs programs that the model wrote; if they may run on this machine, "
                    "say --confirm-run-unsafe-code"
                )
        if self.samples and self.limit:
            raise Problem("--samples and --limit: name one of them")
        if strangers := set(self.documents) - ({*self.tasks} - {taskset.AGREEMENT}):
            raise Problem(f"--samples {min(strangers)}: it is not among --tasks that have numbered documents")
        if not self.mine():
            raise Problem(
                f"--shard {self.shard}: there is nothing in it; expected I up to N, and fewer parts"
            )
        boundaries.check_until(self.context_until, self.protocol, self.tasks, "--context-until ")
        if self.protocol != INSIDE:
            for task in self.tasks:
                if task == taskset.AGREEMENT:
                    raise Problem(
                        f"task {task}: its stories have no question, so --protocol {INSIDE} is its only"
                    )
                boundaries.rule_of(task, self.until(task))

    def _check_told(self) -> None:
        """Problem for settings that none of the tasks reads."""
        unread = self._check_names(self.tasks)  # members of groups among them
        made = lambda task: (
            task.startswith(settings.MADE) or (not _is_ours(task) and taskset.is_made(task, self.sources))
        )
        if unread and not any(map(made, self.tasks)):
            raise Problem(
                f"--metadata {unread[0]}: none of the tasks reads it; expected one that makes its rows, as "
                f"{settings.MADE}* and RULER's do"
            )
        if self.apply_chat_template and "humaneval_local" in self.tasks:
            raise Problem(
                "task humaneval_local: in a chat its bare prompt is answered with prose; expected "
                "humaneval_local_instruct"
            )
        if self.num_fewshot and not any(taskset.takes_shots(task, self.sources) for task in self.tasks):
            raise Problem(f"--num-fewshot {self.num_fewshot}: none of the tasks takes shots")
        for task in self.tasks:
            taskset.check_shots(task, self.num_fewshot, self.sources)
        if self.gen_kwargs and not any(taskset.writes(task, self.sources) for task in self.tasks):
            raise Problem(
                f"--gen-kwargs {self.gen_kwargs}: none of the tasks writes text; expected one that does, "
                "as recall_em"
            )

    def _check_names(self, tasks: Collection[str]) -> list[str]:
        """The names in --metadata that not every task reads; Problem for one that none of these knows."""
        others = [task for task in tasks if not _is_ours(task)]
        names = [name for name in arguments(self.metadata) if name not in settings.ANYWHERE]
        settings.check([task for task in tasks if _is_ours(task)], others, names)
        return names

    def until(self, task: str) -> str | None:
        """The text before which a task's prompts are cut, if its user sets one."""
        if self.context_until is not None:
            return self.context_until
        return taskset.metadata(task, self.sources).get(boundaries.FIELD)

    def _check_options(self) -> None:
        """Problem for options that cannot be; a YAML file among the tasks becomes its task. Tasks that make
        their rows themselves, as RULER's do, are told where the tokenizer is."""
        from kvlab.devices import read_map
        from kvlab.models import source_of
        from kvlab.ranks import split

        if len(self.devices) > 1 and self.jobs is not None:
            raise Problem(f"--jobs {self.jobs}: with --device {self.device} there is one process on each")
        if (self.device_map is not None) + (self.device is not None) + self.tp > 1:
            raise Problem("--device, --device-map and --tp: name one of them")
        if self.device_map is not None:
            read_map(self.device_map)
        if self.tp and (self.on is not None or self.jobs):
            raise Problem("--tp: the processes are torchrun's, so there is no --on and no --jobs")
        if self.tp:
            split(source_of(self.model))
        folders, tasks, named = [self.include_path] if self.include_path else [], [], []
        if self.include_path and not Path(self.include_path).is_dir():
            raise Problem(f"--include-path {self.include_path}: there is no such folder")
        for task in self.tasks:
            if yamls.is_file(task):
                named.append(taskset.from_file(task))
                task = named[-1][0]
            tasks.append(task)
        rows = []
        for pair in self.data:
            task, equals, file = pair.partition("=")
            if not equals or not Path(file).is_file():
                raise Problem(f"--data {pair}: expected TASK=FILE, and the file to be there")
            data.rows(f"--data {pair}", file)
            rows.append((task, file))
        self._check_names(tasks)  # before any of them makes its rows
        metadata = settings.lengths(tasks, arguments(self.metadata))
        about = json.dumps({"tokenizer": str(source_of(self.model))} | metadata, sort_keys=True)
        self.tasks = tuple(tasks)
        self.sources = taskset.Sources(tuple(folders), tuple(named), tuple(rows), about)
        settings.generation(arguments(self.gen_kwargs), "--gen-kwargs")
        in_parts = self.device_map is not None or self.tp
        if self.engine is None:
            self.engine = "eager" if in_parts else self.engine_here()
        if self.engine != "eager" and in_parts:
            raise Problem(f"--engine {self.engine}: the model is in one piece: no --device-map, no --tp")
        if unknown := set(arguments(self.model_args)) - {"max_length"}:
            raise Problem(f"--model-args {', '.join(sorted(unknown))}: expected max_length=TOKENS")
        longest = arguments(self.model_args).get("max_length", 2)
        if isinstance(longest, bool) or not isinstance(longest, int) or longest < 2:
            raise Problem(f"--model-args max_length={longest}: expected a number of tokens from 2 on")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise Problem("--fewshot-as-multiturn: turns need --apply-chat-template")

    @property
    def prompting(self) -> dict:
        """How prompts are made, as `lm_eval.evaluator.evaluate` is told."""
        names = ("system_instruction", "apply_chat_template", "fewshot_as_multiturn")
        return {name: getattr(self, name) for name in names}

    def cells(self) -> list[Cell]:
        from kvlab.devices import read_map

        # `batch_size` and `threads` decide about last digits: see docs/promises.md
        said = ("protocol", "num_fewshot", "seed", "gen_kwargs", "model_args", "metadata", "context_until")
        settings = {name: getattr(self, name) for name in (*said, "batch_size", "threads")}
        settings |= self.prompting | {"evict": eviction(self.protocol, self.evict)}
        settings |= {"engine": self.engine} if self.engine != "eager" else {}  # cells without it are eager's
        settings |= {"device_map": read_map(self.device_map)} if self.device_map else {}
        settings |= {"tp": int(os.environ["WORLD_SIZE"])} if self.tp else {}
        files = {task: taskset.rows_digest(task, self.num_fewshot, self.sources) for task in self.tasks}
        chosen = {task: {"documents": numbers} for task, numbers in self.documents.items()}
        mine = self.mine()
        return [
            Cell(
                self.model_name,
                method,
                task,
                self.configuration(method=code, task=files[task], **settings, **chosen.get(task, {})),
            )
            for task in self.tasks
            for method, code in self.codes.items()
            if (task, method) in mine
        ]

    def mine(self) -> set[tuple[str, str]]:
        """The (task, method)s of this shard: whole tasks, or parts of their methods where tasks are few."""
        part, parts = settings.shard(self.shard)
        jobs = pieces([(task, tuple(self.codes)) for task in self.tasks], parts)
        return {(task, method) for task, methods in jobs[part - 1 :: parts] for method in methods}

    @property
    def documents(self) -> dict[str, list[int]]:
        """--samples as it was read: {task: the numbers of its documents}."""
        return settings.documents(self.samples)

    def run(self, store, show) -> int:
        if not (store.remote or self.on or self.tp):  # else who computes may not reach the folder
            self._partial = (store.out / kept.FOLDER).resolve()
        if self.write_out and self.log_samples != NONE:
            self.log_samples = WHOLE
        failed = super().run(store, show)
        first = {cell.task: cell for cell in reversed(self.cells())} if self.write_out else {}
        first.pop(taskset.AGREEMENT, None)
        for task, cell in first.items():
            line = next(iter(store.samples(vars(cell))), {})
            told = f"{line['prompt']!r}; right: {line['gold']}" if "prompt" in line else NOT_KEPT
            show.line(f"{task}: {told}")
        return failed

    def partial(self, job: tuple[str, tuple[str, ...]]) -> Path | None:
        """The file of a job's finished batches; None where none are kept."""
        task, methods = job
        names = [self._names[task, method] for method in methods if self._partial]
        return kept.path_of(self._partial, names) if names else None

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        wanted = {(cell.task, cell.method): cell for cell in cells}
        self._names = {place: Store.name(**vars(cell)) for place, cell in wanted.items()}
        whole = [(task, tuple(c.method for c in cells if c.task == task)) for task in self.tasks]
        whole = [(task, methods) for task, methods in whole if methods]
        whole.sort(key=lambda job: -WORK.get(job[0], 1.5))
        usual = min(2, cores()) if self.small() and not self.tp else 0
        processes = self.jobs if self.jobs is not None else usual

        parts: dict[tuple, float] = {}

        def report(job, done: int, total: int, doing: str = "") -> None:
            if doing:
                bar.doing(doing)
                return
            parts[job] = len(job[1]) * min(1.0, done / max(total, 1))
            share = sum(part for (task, _), part in parts.items() if task == job[0])
            bar.at(job[0], WORK.get(job[0], 1.5) * share)
            if total > 1:
                bar.doing(f"{job[0]}: {done} of {total} requests")

        devices = tuple(self.devices) if len(self.devices) > 1 else ()
        pool = self.pool(self.called) or workers.Local(processes, self.threads, devices)
        for done in pool.run(self.maker, self, partial(pieces, whole), report):
            task, methods = done.job
            for method in methods:
                one = done.found if isinstance(done.found, Failed) else done.found[method]
                yield wanted[task, method], one if isinstance(one, Failed) else one | done.about
            if not isinstance(done.found, Failed):
                kept.Kept(self.partial(done.job)).drop()
            report(done.job, 1, 1)

    def work(self, cell: Cell) -> float:
        return WORK.get(cell.task, 1.5)

    def called(self, job: tuple[str, tuple[str, ...]]) -> str:
        """A job's name, of which Ray's dashboard and logs show one line."""
        task, methods = job
        return f"{comparable.named(methods)} · {task} · {self.protocol}"

    def result(self, found: dict) -> str:
        return shown(found["metrics"][0])


def _is_ours(task: str) -> bool:
    """Is a task kvlab's own?"""
    return task == taskset.AGREEMENT or task in taskset.local_names()
