"""Accuracy and agreement cells are made here: one task, for all the methods that miss it."""

from __future__ import annotations

import contextlib
import ctypes
import io
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from lm_eval.api.metrics import mean
from lm_eval.evaluator import evaluate

import kvlab
from kvlab.decode import Stepper
from kvlab.faster import engine_of
from kvlab.ranks import added, ranks_of

from ..core.errors import Failed, Problem, describe, no_room
from ..core.study import arguments
from . import agreement, samples, taskset
from .batching import Meter, metric_row
from .kept import Kept
from .lm import KVLabLM
from .protocols import FIRST

CHOICE, WRITTEN, TOLD, ROLLED = "multiple_choice", "generate_until", "loglikelihood", "loglikelihood_rolling"


def setup(settings, report: Callable) -> Callable:
    """A worker's handler: (task, methods) -> {method: the numbers of that cell, or why there are none}.

    settings: an `Accuracy`.
    """
    keep_memory()
    report(0, 1, f"loading {settings.model_name}")
    specs = {spec.text: spec for spec in settings.specs}
    where = {"device": settings.device, "dtype": settings.dtype, "engine": settings.engine}
    where |= {"protocol": settings.protocol, "evict": settings.evict, "context_until": settings.context_until}
    where |= arguments(settings.model_args) | {"device_map": settings.device_map, "tp": settings.tp}
    lm = KVLabLM(settings.model, settings.specs[0], batch_size=settings.batch_size, **where)
    if settings.apply_chat_template and not lm.tokenizer.chat_template:
        raise Problem("--apply-chat-template: this model's tokenizer has no chat template")
    lm.together(settings.specs)  # wrong parameters and weights show before anything is computed
    Stepper(lm.model, kvlab.make_cache(lm.model, "full")).feed(
        torch.zeros(1, 2, dtype=torch.long).to(lm.device)
    )
    lm.on_progress = report
    told = settings.prompting | {"confirm_run_unsafe_code": settings.confirm_run_unsafe_code}
    about = {
        "device": str(lm.device),
        "dtype": str(lm.model.dtype).removeprefix("torch."),
        "value_bytes": lm.model.dtype.itemsize,
        "batch_size": lm.batch_size,
        "engine": engine_of(lm.model, lm.batch_size),
    }

    def handle(job: tuple[str, tuple[str, ...]]) -> dict:
        name, methods = job
        mine = [specs[method] for method in methods]
        lm.kept = Kept(settings.partial(job))
        if name == taskset.AGREEMENT:
            shots = 0
            ids = agreement.prompts(lm.tokenizer, taskset.stories(), settings.limit, lm.max_length)
            found = agreement.measure(lm.model, mine, ids, lm.batch_size, report, lm.kept)
        else:
            report(0, 1, f"{name}: making its documents")
            lm.together(mine)
            how = settings.num_fewshot, settings.seed, settings.sources, settings.gen_kwargs
            found, task = {}, taskset.prepared(name, *how)
            some, count = settings.documents.get(name), len(task.eval_docs)
            if some and max(some) >= count:
                raise Problem(f"--samples {name}: {max(some)} is none of its documents 0 to {count - 1}")
            if until := settings.until(name):
                lm.untils[name] = until
            lm.shots[name] = shots = task.get_config("num_fewshot")
            if settings.log_samples != samples.NONE:
                lm.evidence = partial(samples.evidence, task)
            for method in methods:
                try:
                    lm.use(method)
                    task.set_fewshot_seed(settings.seed)  # or each method is asked behind other shots
                    one = score(lm, task, settings.limit, settings.log_samples, some, **told)
                    found[method] = one | lm.seconds(one["seconds"])
                    if method == "full" and shots and settings.protocol == FIRST:
                        found[method]["floor"] = floor(lm, name, settings, some, told)
                except Exception as error:
                    if no_room(error):  # it is this machine's, and another one may have some
                        raise
                    found[method] = lacking(error, dict(settings.sources.data).get(name), name)
        known = about | {"shots": shots}
        return {
            method: Failed(*describe(one)) if isinstance(one, Exception) else of_all(lm.model, one) | known
            for method, one in found.items()
        }

    return handle


def lacking(error: Exception, file: str | None, name: str) -> Exception:
    """A field that is missed where a user's own rows are scored, as a line that names their file."""
    if file is None or not isinstance(error, KeyError):
        return error
    line = f"--data {name}={file}: a row has no field {error.args[0]!r}, which the task's scores need"
    return Problem(line).with_traceback(error.__traceback__)


def of_all(model, found: dict) -> dict:
    """A cell's numbers where processes share the model's heads: the bytes of all of them."""
    sizes = added(ranks_of(model), [found["bytes"][name] for name in Meter.NAMES])
    return found | {"bytes": found["bytes"] | dict(zip(Meter.NAMES, sizes, strict=True))}


def floor(lm: KVLabLM, name: str, settings, some: list[int] | None, told: dict) -> dict:
    """What `full` scores without any shots on the same documents, a metric's row: under `context-first` the
    shots are the context, so a method that lost all of it would come down to this. some, told: see `score`,
    which has told as prompting."""
    bare = KVLabLM(
        lm.model, "full", tokenizer=lm.tokenizer, batch_size=lm.batch_size, max_length=lm.max_length
    )
    task = taskset.prepared(name, 0, settings.seed, settings.sources, settings.gen_kwargs)
    return score(bare, task, settings.limit, some=some, **told)["metrics"][0]


def keep_memory() -> None:
    """Let glibc keep large freed blocks. A batch's caches are copied at every step; handing the memory
    back and fetching it again, page by page, costs as much as the copying."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def jackknife(aggregate: Callable, items: list) -> float | None:
    """Standard error of an aggregate over documents, by leaving one out (lm-eval has no formula)."""
    if len(items) < 2:
        return None
    left = np.array([aggregate(items[:i] + items[i + 1 :]) for i in range(len(items))])
    return float(np.sqrt((len(items) - 1) * left.var()))


def chance(task, choices: list[int]) -> float | None:
    """What guessing scores: one of each document's `choices`; where text is written, what the task's own YAML
    says under `metadata: chance:` (one of the answers that the document offers), else nothing, and so where a
    given text is or is not the likeliest; None where no share of answers is counted, as for perplexity."""
    if choices:
        return float(np.mean([1 / count for count in choices]))
    if task.OUTPUT_TYPE in (WRITTEN, TOLD):
        return float((task.config.metadata or {}).get("chance", 0))
    return None


def score(
    lm: KVLabLM, task, limit: int | None, log_samples=samples.NONE, some: list[int] | None = None, **prompting
) -> dict:
    """One cell's numbers: metrics (the first one is the main one: the task's first of which more is better,
    so lambada's share of right words comes before its perplexity), values per document, bytes; unless
    `log_samples` is "none" the lines of `samples.py`. some: the numbers of the documents that are asked.
    prompting: as `evaluate` takes it."""
    started, name = time.perf_counter(), task.task_name
    with contextlib.redirect_stdout(io.StringIO()):
        prompting |= {"samples": None if some is None else {name: some}}
        results = evaluate(lm, {"tasks": {name: task}}, limit=limit, bootstrap_iters=1000, **prompting)
    found, better = results["results"][name], results["higher_is_better"][name]
    logged, metrics, values = results["samples"][name], [], {}
    for key in [key for key in found if "," in key and "_stderr," not in key]:
        metric, chosen = key.split(",")
        if metric.isdecimal() and found[key] == -1:  # a length that RULER was not asked for
            continue
        items = [row[metric] for row in logged if row["filter"] == chosen and metric in row]
        items = [one.tolist() if hasattr(one, "tolist") else one for one in items]  # numpy's numbers
        stderr = found.get(f"{metric}_stderr,{chosen}")
        if not isinstance(stderr, float):
            stderr = jackknife(task.aggregation().get(metric, mean), items)  # RULER names some lengths only
        label = metric if chosen == "none" else key
        metrics.append(metric_row(label, float(found[key]), stderr, len(items), better.get(metric, True)))
        comparable = task.OUTPUT_TYPE == ROLLED or all(isinstance(one, int | float) for one in items)
        values[label] = items if comparable else []  # f1 and its like are of all documents together
    metrics.sort(key=lambda told: not told["higher_is_better"])
    choices = [len(task.doc_to_choice(row["doc"])) for row in logged if task.OUTPUT_TYPE == CHOICE]
    told = {}
    if log_samples != samples.NONE:
        metric, _, chosen = metrics[0]["metric"].partition(",")
        some = [row for row in logged if row["filter"] == (chosen or "none")]
        told["samples"] = samples.rows(task, some, metric, log_samples == samples.WHOLE, lm.held)
    return told | {
        "metrics": metrics,
        "values": values,
        "output_type": task.OUTPUT_TYPE,
        "chance": chance(task, choices) if values[metrics[0]["metric"]] else None,
        "bytes": lm.meter.means(),
        "scored": lm.meter.scored,
        **lm.prefills(),
        "seconds": time.perf_counter() - started,
    }
