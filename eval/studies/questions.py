"""Questions about facts in a document, answered through a cache, and perplexity through a cache."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

import kvlab
from kvlab.decode import Stepper
from kvlab.spec import Spec

from ..accuracy.batching import pad_left
from ..accuracy.prefill import shared
from ..accuracy.taskset import stories
from ..tasks import corpus

FACTS, FILLER = 12, 24  # facts in a document, sentences of prose between them
ROWS = 25  # rows at a time
SEED = 3_000_000  # apart from the seeds of training and of the tasks


def questions(tokenizer, count: int) -> tuple[list[list[int]], list[int]]:
    """Token ids of `count` documents with a question, and the first token of each answer."""
    rng, prompts, answers = random.Random(SEED), [], []
    for _ in range(count):
        document = corpus.recall(rng, FACTS, filler=corpus.prose(rng, FILLER))
        prompts.append(tokenizer(document.text).input_ids)
        answers.append(tokenizer(document.answer).input_ids[0])
    return prompts, answers


def asked_again(tokenizer, count: int, times: int = 9) -> Iterator[tuple[list[int], list[int], int]]:
    """Of `count` documents (token ids, those of one question asked `times` times without an answer, first
    token of its answer). The fact is in the first eighth of the document."""
    rng = random.Random(SEED)
    while count:
        document = corpus.recall(rng, FACTS, filler=corpus.prose(rng, FACTS))
        question, answer = document.questions[0]
        if document.context.index(answer) < len(document.context) / 8:
            count -= 1
            ids = (tokenizer(text).input_ids for text in (document.context, question * times, answer))
            context, asked, (first, *_) = ids
            yield context, asked, first


@torch.inference_mode()
def answered(
    model, prompts, answers, methods: list[str | Spec], streamed: int = 1
) -> dict[str, tuple[float, float]]:
    """{method: (part of the questions answered right, bytes moved by a step)}.

    The last `streamed` tokens of every document are fed one by one, so that the answer comes from what the
    method kept or fetched; the rest is one prefill, shared by all methods.
    """
    methods = {str(method): method for method in methods}
    right = dict.fromkeys(methods, 0)
    moved: dict[str, list[int]] = {name: [] for name in methods}
    for start in range(0, len(prompts), ROWS):
        ids, mask = pad_left(prompts[start : start + ROWS], 0, model.device)
        prefilled = None if mask is None else mask[:, :-streamed]
        truth = torch.tensor(answers[start : start + ROWS], device=model.device)
        caches = {name: kvlab.make_cache(model, method) for name, method in methods.items()}
        for name, stepper, logits in shared(model, caches, ids[:, :-streamed], prefilled, last=True):
            if isinstance(logits, Exception):
                raise logits
            for column in range(ids.shape[1] - streamed, ids.shape[1]):
                logits = stepper.feed(ids[:, column : column + 1], last=True)
            right[name] += int((logits.argmax(-1) == truth).sum())
            moved[name].append(stepper.cache.stats().moved_bytes / len(ids))
    return {name: (right[name] / len(prompts), statistics.mean(moved[name])) for name in methods}


@torch.inference_mode()
def perplexity(model, ids: Tensor, method: str | Spec) -> float:
    """Of all but the first quarter of ids `[rows, tokens]`, every token predicted through the cache."""
    found = losses(Stepper(model, kvlab.make_cache(model, method)), ids, ids.shape[1] // 4)
    return math.exp(sum(found) / len(found))


@torch.inference_mode()
def losses(stepper: Stepper, ids: Tensor, first: int) -> list[float]:
    """Mean loss over the rows of every token from `first` on, each predicted through the cache, in nats."""
    logits, found = stepper.feed(ids[:, :first], last=True), []
    for column in range(first, ids.shape[1]):
        token = ids[:, column : column + 1]
        found.append(-logits.log_softmax(-1).gather(1, token).mean().item())
        logits = stepper.feed(token, last=True)
    return found


def held_out(model, tokenizer, tokens: int, limit: int | None) -> Tensor:
    """The first `tokens` token ids of the stories that have so many, at most `limit`, `[stories, tokens]`."""
    texts = [tokenizer(story).input_ids[:tokens] for story in stories()]
    return torch.tensor([ids for ids in texts if len(ids) == tokens][:limit], device=model.device)
