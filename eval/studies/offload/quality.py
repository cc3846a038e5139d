"""Experiments with answers: accuracy when offloading fetches, evicts or rounds."""

from __future__ import annotations

import statistics

import torch

import kvlab
from kvlab.decode import Stepper
from kvlab.models import ModelShape

from ...accuracy import agreement
from ...accuracy.taskset import stories
from ..questions import ROWS, answered, held_out, perplexity, questions
from .published import MEASURED, MODELLED, row
from .walltime import steps

DOCUMENTS = 100
STREAM = 64  # tokens of a document that the pool's experiment feeds one by one
STORIES = 12
STORY = 200  # tokens of a story, of which the first quarter is prompt
POOL = {("fifo", 0.8): 30.99, ("lru", 0.8): 10.55, ("counter", 0.8): 10.55, ("any", 1.0): 10.55}
LINK = 2e8  # bytes per second, for the latencies of `sensitivity`


def sensitivity(study) -> dict:
    """3. Accuracy, distance to the full cache and latency over alpha and over the partial ratio."""
    model, tokenizer = study.load()
    prompts, answers = questions(tokenizer, study.limit or DOCUMENTS)
    tokens = round(statistics.mean(map(len, prompts)))
    changes = [f"alpha={alpha}" for alpha in range(1, 10)] + [f"ratio={r / 10:g}" for r in range(1, 11)]
    methods = [f"infinigen:budget=0.2,{change}" for change in changes]
    found = answered(model, prompts, answers, ["full", *methods])
    rows = [row("sensitivity", "full: accuracy", 100 * found["full"][0], "%", MEASURED, tokens)]
    context = ModelShape.of(model).context or 2048
    texts = agreement.prompts(tokenizer, stories(), study.limit or STORIES, context)
    distance = agreement.measure(model, methods, texts, batch_size=STORIES)
    ids = torch.tensor([(prompts[0] * 9)[: min(1800, context - 16)]], device=model.device)
    for change, method in zip(changes, methods, strict=True):
        cache = kvlab.make_cache(model, f"{method},link={LINK}")
        Stepper(model, cache).feed(ids, last=True)
        milliseconds = statistics.median(steps(model, cache, 10)[2:])
        accuracy, moved = found[method]
        rows += [
            row("sensitivity", f"{change}: accuracy", 100 * accuracy, "%", MEASURED, tokens),
            row(
                "sensitivity",
                f"{change}: distance to full",
                kl(distance[method]),
                "nats/token",
                MEASURED,
                texts.shape[1],
            ),
            row("sensitivity", f"{change}: bytes moved by a step", moved / 1e3, "kB", MEASURED, tokens),
            row("sensitivity", f"{change}: latency", milliseconds, "ms/token", MODELLED, ids.shape[1]),
        ]
    return {"rows": rows}


def kl(cell: dict) -> float:
    """Mean KL divergence from the full cache's predictions, of what `agreement.measure` found."""
    if isinstance(cell, Exception):
        raise cell
    return next(metric["value"] for metric in cell["metrics"] if metric["metric"] == "kl")


def pool(study) -> dict:
    """7. Accuracy and perplexity with a host memory of 60, 80 and 100 %, by the victim's policy."""
    model, tokenizer = study.load()
    prompts, answers = questions(tokenizer, min(ROWS, study.limit or ROWS))
    tokens = round(statistics.mean(map(len, prompts)))
    text = held_out(model, tokenizer, STORY, study.limit or STORIES)
    rows = []
    for policy, part in [("any", 1.0), *((p, c) for c in (0.8, 0.6) for p in ("fifo", "lru", "counter"))]:
        victim = "" if policy == "any" else f",victim={policy}"

        def method(held: int, part=part, victim=victim) -> str:
            return f"infinigen:budget=0.2,pool={int(part * held) if part < 1 else 1}{victim}"

        label = f"{policy}, {part:.0%} of the host memory"
        if min(map(len, prompts)) > STREAM:
            answer = method(tokens)
            accuracy, _ = answered(model, prompts, answers, [answer], STREAM)[answer]
            rows.append(row("pool", f"{label}: accuracy", 100 * accuracy, "%", MEASURED, tokens))
        value, published = perplexity(model, text, method(STORY)), POOL.get((policy, part))
        rows.append(row("pool", f"{label}: perplexity", value, "perplexity", MEASURED, STORY, published))
    return {"rows": rows}


BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def accuracy(study) -> dict:
    """9. Accuracy of quantization, eviction and InfiniGen against the part of the cache held or fetched."""
    model, tokenizer = study.load()
    prompts, answers = questions(tokenizer, study.limit or DOCUMENTS)
    tokens = round(statistics.mean(map(len, prompts)))
    selecting = ("sinks", "h2o", "snapkv", "tova", "topk", "infinigen")
    methods = ["full", "int8", "int4"] + [f"{name}:budget={part}" for name in selecting for part in BUDGETS]
    found = answered(model, prompts, answers, methods)
    return {
        "rows": [row("accuracy", method, 100 * found[method][0], "%", MEASURED, tokens) for method in methods]
    }


EXPERIMENTS = {"sensitivity": sensitivity, "pool": pool, "accuracy": accuracy}
