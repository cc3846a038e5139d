"""Experiments with answers: accuracy of what offloading fetches, evicts or rounds away."""

from __future__ import annotations

import math
import random
import statistics

import torch
from torch import Tensor

import kvlab
from eval.tasks import corpus
from kvlab.decode import Stepper

from .. import agreement
from ..prefill import shared
from ..taskset import stories
from .rows import MEASURED, MODELLED, Row
from .walltime import steps

DOCUMENTS = 100
FACTS, FILLER = 12, 24  # facts in a document, sentences of prose between them
ROWS = 25  # rows at a time
STREAM = 64  # tokens of a document that the pool's experiment feeds one by one
STORIES = 12
STORY = 200  # tokens of a story, of which the first quarter is prompt
SEED = 3_000_000  # apart from the seeds of training and of the tasks
POOL = {("fifo", 0.8): 30.99, ("lru", 0.8): 10.55, ("counter", 0.8): 10.55, ("any", 1.0): 10.55}
LINK = 2e8  # bytes per second, for the latencies of `sensitivity`


def questions(tokenizer, count: int) -> tuple[list[list[int]], list[int]]:
    """Token ids of `count` documents with a question, and the first token of each answer."""
    rng, prompts, answers = random.Random(SEED), [], []
    for _ in range(count):
        document = corpus.recall(rng, FACTS, filler=corpus.prose(rng, FILLER))
        prompts.append(tokenizer(document.text).input_ids)
        answers.append(tokenizer(document.answer).input_ids[0])
    return prompts, answers


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """(ids, mask) `[rows, tokens]`, padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@torch.inference_mode()
def answered(
    model, prompts, answers, methods: list[str], streamed: int = 1
) -> dict[str, tuple[float, float]]:
    """{method: (part of the questions answered right, bytes moved by a step)}.

    The last `streamed` tokens of every document are fed one by one, so that the answer comes from what the
    method kept or fetched; the rest is one prefill, shared by all methods.
    """
    right = dict.fromkeys(methods, 0)
    moved: dict[str, list[int]] = {name: [] for name in methods}
    for start in range(0, len(prompts), ROWS):
        ids, mask = padded(prompts[start : start + ROWS])
        ids, mask = ids.to(model.device), mask.to(model.device)
        truth = torch.tensor(answers[start : start + ROWS], device=model.device)
        caches = {name: kvlab.make_cache(model, name) for name in methods}
        for name, stepper, logits in shared(
            model, caches, ids[:, :-streamed], mask[:, :-streamed], last=True
        ):
            if isinstance(logits, Exception):
                raise logits
            for column in range(ids.shape[1] - streamed, ids.shape[1]):
                logits = stepper.feed(ids[:, column : column + 1], last=True)
            right[name] += int((logits.argmax(-1) == truth).sum())
            moved[name].append(stepper.cache.stats().moved_bytes / len(ids))
    return {name: (right[name] / len(prompts), statistics.mean(moved[name])) for name in methods}


def sensitivity(settings) -> list[Row]:
    """3. Accuracy, distance to the full cache and latency over alpha and over the partial ratio."""
    model, tokenizer = settings.load()
    prompts, answers = questions(tokenizer, settings.limit or DOCUMENTS)
    tokens = round(statistics.mean(map(len, prompts)))
    changes = [f"alpha={alpha}" for alpha in range(1, 10)] + [f"ratio={r / 10:g}" for r in range(1, 11)]
    methods = [f"infinigen:budget=0.2,{change}" for change in changes]
    found = answered(model, prompts, answers, ["full", *methods])
    rows = [Row("sensitivity", "full: accuracy", 100 * found["full"][0], "%", MEASURED, tokens)]
    texts = agreement.prompts(tokenizer, stories(), settings.limit or STORIES, settings.context(model))
    distance = agreement.measure(model, methods, texts, batch_size=STORIES)
    ids = torch.tensor([(prompts[0] * 9)[: min(1800, settings.context(model) - 16)]], device=model.device)
    for change, method in zip(changes, methods, strict=True):
        cache = kvlab.make_cache(model, f"{method},link={LINK}")
        Stepper(model, cache).feed(ids, last=True)
        milliseconds = statistics.median(steps(model, cache, 10)[2:])
        accuracy, moved = found[method]
        rows += [
            Row("sensitivity", f"{change}: accuracy", 100 * accuracy, "%", MEASURED, tokens),
            Row(
                "sensitivity",
                f"{change}: distance to full",
                kl(distance[method]),
                "nats/token",
                MEASURED,
                texts.shape[1],
            ),
            Row("sensitivity", f"{change}: bytes moved by a step", moved / 1e3, "kB", MEASURED, tokens),
            Row("sensitivity", f"{change}: latency", milliseconds, "ms/token", MODELLED, ids.shape[1]),
        ]
    return rows


def kl(cell: dict) -> float:
    """Mean KL divergence from the full cache's predictions, of what `agreement.measure` found."""
    if isinstance(cell, Exception):
        raise cell
    return next(metric["value"] for metric in cell["metrics"] if metric["metric"] == "kl")


def pool(settings) -> list[Row]:
    """7. Accuracy and perplexity with a host memory of 60, 80 and 100 %, by the victim's policy."""
    model, tokenizer = settings.load()
    prompts, answers = questions(tokenizer, min(ROWS, settings.limit or ROWS))
    tokens = round(statistics.mean(map(len, prompts)))
    text = [tokenizer(story).input_ids[:STORY] for story in stories()]
    text = [ids for ids in text if len(ids) == STORY][: settings.limit or STORIES]
    text = torch.tensor(text, device=model.device)
    rows = []
    for policy, part in [("any", 1.0), *((p, c) for c in (0.8, 0.6) for p in ("fifo", "lru", "counter"))]:
        victim = "" if policy == "any" else f",victim={policy}"

        def method(held: int, part=part, victim=victim) -> str:
            return f"infinigen:budget=0.2,pool={int(part * held) if part < 1 else 1}{victim}"

        label = f"{policy}, {part:.0%} of the host memory"
        if min(map(len, prompts)) > STREAM:
            answer = method(tokens)
            accuracy, _ = answered(model, prompts, answers, [answer], STREAM)[answer]
            rows.append(Row("pool", f"{label}: accuracy", 100 * accuracy, "%", MEASURED, tokens))
        value, published = perplexity(model, text, method(STORY)), POOL.get((policy, part))
        rows.append(Row("pool", f"{label}: perplexity", value, "perplexity", MEASURED, STORY, published))
    return rows


@torch.inference_mode()
def perplexity(model, ids: Tensor, method: str) -> float:
    """Of all but the first quarter of ids `[rows, tokens]`, every token predicted through the cache."""
    stepper, first = Stepper(model, kvlab.make_cache(model, method)), ids.shape[1] // 4
    logits, total = stepper.feed(ids[:, :first], last=True), 0.0
    for column in range(first, ids.shape[1]):
        total -= logits.log_softmax(-1).gather(1, ids[:, column : column + 1]).mean().item()
        logits = stepper.feed(ids[:, column : column + 1], last=True)
    return math.exp(total / (ids.shape[1] - first))


BUDGETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
QUANTIZED = {"int8": 8 + 16 / 32, "int4": 4 + 16 / 32}  # bits per value for heads of 32


def accuracy(settings) -> list[Row]:
    """9. Accuracy of quantization, eviction and InfiniGen against the part of the cache held or fetched."""
    model, tokenizer = settings.load()
    prompts, answers = questions(tokenizer, settings.limit or DOCUMENTS)
    tokens = round(statistics.mean(map(len, prompts)))
    selecting = ("sinks", "h2o", "snapkv", "tova", "topk", "infinigen")
    methods = ["full", *QUANTIZED] + [f"{name}:budget={part}" for name in selecting for part in BUDGETS]
    found = answered(model, prompts, answers, methods)
    rows = []
    for method in methods:
        rows.append(Row("accuracy", method, 100 * found[method][0], "%", MEASURED, tokens))
    return rows
