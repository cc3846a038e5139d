"""Accuracy and agreement cells: which are wanted, which are there, and making the others.

A job is one task for all methods that miss it; jobs go to worker processes, the longest first, and
the cells of a finished job are stored at once.
"""

from __future__ import annotations

from collections.abc import Callable

from . import taskset, workers
from .machine import code_digest, cores, model_digest
from .results import Store
from .run import Settings, record
from .workers import Failed

HEAVY = ("prose", "agreement", "needle_em", "needle", "chain")  # local tasks that take longest go first


def configuration(settings: Settings, task: str) -> dict:
    """What must be the same for a stored accuracy or agreement cell to count as this one."""
    return {
        "model": model_digest(settings.model),
        "task": taskset.task_digest(task),
        "code": code_digest(),
        "device": settings.device,
        "dtype": settings.dtype,
        "limit": settings.limit,
        "num_fewshot": settings.num_fewshot,
        "seed": settings.seed,
    }


def setup(settings: Settings, report: Callable) -> Callable:
    """A worker's handler: (task, methods) -> {method: the numbers of that cell, or (line, traceback)}."""
    import torch

    import kvlab
    from kvlab.decode import Stepper

    from .accuracy import KVLabLM, score
    from .agreement import measure, prompts

    workers.keep_memory()
    lm = KVLabLM(
        settings.model,
        settings.methods[0],
        device=settings.device,
        dtype=settings.dtype,
        batch_size=settings.batch_size,
    )
    lm.together(settings.methods)  # wrong parameters and weights show before anything is computed
    Stepper(lm.model, kvlab.make_cache(lm.model, "full")).feed(
        torch.zeros(1, 2, dtype=torch.long).to(lm.device)
    )
    lm.on_progress = report
    about = {"device": str(lm.device), "value_bytes": lm.model.dtype.itemsize}

    def handle(job: tuple[str, tuple[str, ...]]) -> dict:
        name, methods = job
        if name == taskset.AGREEMENT:
            ids = prompts(lm.tokenizer, taskset.stories(), settings.limit, lm.max_length)
            found = measure(lm.model, methods, ids, settings.batch_size, report)
        else:
            lm.together(methods)
            found, task = {}, prepare(name, settings)
            for method in methods:
                try:
                    lm.use(method)
                    found[method] = score(lm, task, settings.limit)
                except Exception as error:
                    found[method] = error
        return {
            method: workers.describe(one) if isinstance(one, Exception) else one | about
            for method, one in found.items()
        }

    return handle


def prepare(name: str, settings: Settings):
    """An lm-eval task with this run's number of shots and seed, as lm-eval's own command sets them."""
    task = taskset.load(name)[name]
    shots = task.get_config("num_fewshot")
    if settings.num_fewshot is not None and shots != 0:
        task.set_config(key="num_fewshot", value=settings.num_fewshot)
    elif shots is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=settings.seed)
    return task


def accuracy(settings: Settings, store: Store, show) -> int:
    """Make the accuracy and agreement cells that are missing; returns how many could not be made.

    A job is one task with all the methods that miss it, since they share their prefills.
    """
    model, tasks = settings.model_name, settings.tasks
    configs = {task: configuration(settings, task) for task in tasks}
    missing = {
        task: tuple(m for m in settings.methods if store.load(model, m, task, configs[task]) is None)
        for task in tasks
    }
    total, left = len(tasks) * len(settings.methods), sum(map(len, missing.values()))
    show.kept(total - left, total, "accuracy cells")
    jobs = [(task, methods) for task, methods in missing.items() if methods]
    jobs.sort(key=lambda job: HEAVY.index(job[0]) if job[0] in HEAVY else len(HEAVY))
    if not jobs:
        return 0
    small = settings.small()
    count = settings.jobs if settings.jobs is not None else min(2, cores()) if small else 0
    threads = 1 if small else None
    failed = 0
    with show.bar("accuracy", len(jobs)) as bar:
        for job, found in workers.run(setup, settings, jobs, count, threads, bar.at):
            bar.done(job)
            task, methods = job
            if isinstance(found, Failed):
                found = dict.fromkeys(methods, (str(found), found.details))
            for method, numbers in found.items():
                if isinstance(numbers, tuple):
                    failed += 1
                    show.failed(f"{method} on {task}", Failed(*numbers))
                else:
                    store.save(record(settings, model, method, task, configs[task], threads, numbers))
    return failed
