"""The talk's claims about tokens: their importance varies, few are enough, and a pool should count fetches
(Gong, Yi and Zhang 2024)."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Iterator

import torch

from kvlab.attention import group_importance
from kvlab.calibrate.skew import skew
from kvlab.keep.pool import VICTIMS
from kvlab.measure.studies import found, read, scores, skewed, strongest_columns, strongest_of_sum
from kvlab.place.infinigen import InfiniGen

from ...accuracy.taskset import stories
from ...tasks import corpus
from ..questions import answered, asked_again
from .published import MEASURED, row

SHARE = 0.1  # of the tokens: the top tenth
STEPS = 128  # decode steps that are looked at
KEYS = {64: 82.9, 128: 87.8, 256: 91.1, 512: 91.1, 1024: 91.9, 2048: 91.9, 4096: 91.9}  # AI2 elementary


def prose(study, name: str, tokens: int):
    """(model, token ids `[1, tokens]` of stories)."""
    model, tokenizer = study.load(name)
    ids = tokenizer(" ".join(stories()), return_tensors="pt").input_ids[:, :tokens]
    return model, ids.to(model.device)


@torch.no_grad()
def turnover(study) -> dict:
    """10. How the top tenth of a prompt's tokens changes while decoding: the part that was in it at the first
    step and still is, the part that was in it at the step before, and how many tokens ever were."""
    rows = []
    for name in study.models:
        model, ids = prose(study, name, 512 + STEPS)
        passage = read(model, ids)
        prompt = passage.tokens - STEPS
        first, before, ever = [], [], []
        for query, keys in zip(passage.queries, passage.keys, strict=True):
            asked = scores(query[:, -STEPS:], keys[:, :prompt], passage.scaling).transpose(0, 1)
            best = group_importance(asked, len(keys)).topk(round(SHARE * prompt)).indices
            top = torch.zeros(STEPS, len(keys), prompt).scatter_(2, best, 1.0)  # [steps, kv_heads, prompt]
            first.append((top * top[:1]).sum(2).mean(1) / best.shape[2])
            before.append((top[1:] * top[:-1]).sum(2).mean(1) / best.shape[2])
            ever.append(top.cummax(0).values.mean(dim=(1, 2)))
        for what, kept in (("of the first step's", first), ("ever", ever)):
            label = f"{name}: the top tenth, {what}, at step {{}}"
            mean = torch.stack(kept).mean(0).tolist()
            rows += [
                row("turnover", label.format(step), mean[step - 1], "share", MEASURED, prompt)
                for step in (1, 2, 4, 8, 16, 32, 64, 128)
            ]
        mean = torch.stack(before).mean().item()
        rows.append(
            row("turnover", f"{name}: the top tenth, of the step's before", mean, "share", MEASURED, prompt)
        )
    return {"rows": rows}


@torch.no_grad()
def fetched(study) -> dict:
    """11. What alpha = 4 fetches of a guessed layer by the text's length, without a cap and with a fifth."""
    rows = []
    for name in study.models:
        for tokens in (512, 1024, 1536, 2048, 4096):
            model, ids = prose(study, name, tokens)
            if ids.shape[1] < tokens or tokens > (model.config.max_position_embeddings or tokens):
                break
            passage, matrices = read(model, ids), skew(model)
            for cap in (1.0, 0.2):
                fetch = InfiniGen(budget=cap)
                shares = [
                    count / (tokens - 1)
                    for layer in range(2, len(passage.keys))
                    for count in counts(passage, layer, fetch, matrices[layer])
                ]
                label = f"{name}: fetched of a guessed layer, at most {cap:.0%}"
                rows.append(row("fetched", label, statistics.mean(shares), "share", MEASURED, tokens))
    return {"rows": rows}


def counts(passage, layer: int, fetch: InfiniGen, matrix, last: int = 16) -> Iterator[int]:
    """Tokens that the alpha rule fetches for each of the last queries of a passage."""
    query, asked, keys = (
        skewed(x, matrix) for x in (passage.queries[layer], passage.guesses[layer], passage.keys[layer])
    )
    columns = strongest_columns(query[:, :-last], keys[:, :-last], fetch.ratio)
    for past in range(passage.tokens - last, passage.tokens):
        guess = scores(asked[:, past : past + 1], keys[:, :past], passage.scaling, columns)
        cap = max(1, int(fetch.budget * past))
        yield fetch.how_many(guess[None, :, 0], [cap])[0]


@torch.no_grad()
def columns(study) -> dict:
    """12. The columns of the guess, chosen by |KA| + |QA|, the paper's, and by |KA + QA|, the slide's."""
    rows = []
    for name in study.models:
        model, ids = prose(study, name, 512)
        passage, matrices = read(model, ids), skew(model)
        for label, chosen in (("|KA| + |QA|", strongest_columns), ("|KA + QA|", strongest_of_sum)):
            for ratio in (0.1, 0.3, 0.5):
                values = [
                    found(passage, layer, SHARE, ratio=ratio, matrix=matrices[layer], columns=chosen)[0]
                    for layer in range(2, len(passage.keys))
                ]
                rows.append(row("columns", f"{name}: top tenth found, {label}, ratio {ratio:g}",
                                statistics.mean(values), "share", MEASURED, 512))  # fmt: skip
    return {"rows": rows}


def knee(study) -> dict:
    """13. How many keys top-k attention needs: questions about one of 24 facts, in documents of about 4,000
    tokens where the model's context holds them."""
    model, tokenizer = study.load()
    rng, count = random.Random(13), study.limit or 48
    sentences = 260 if (model.config.max_position_embeddings or 0) > 4096 else 60
    ways, right, lengths = (
        {size: f"topk:budget={size}" for size in (2, 4, 8, 16, 32, *KEYS)},
        Counter(),
        [],
    )
    for _ in range(count):  # a document at a time: caches of so many tokens are large
        document = corpus.recall(rng, 24, filler=corpus.prose(rng, sentences))
        prompt, answer = (tokenizer(text).input_ids for text in (document.text, document.answer))
        lengths.append(len(prompt))
        found = answered(model, [prompt], [answer[0]], ["full", *ways.values()])
        right.update({way: share for way, (share, _) in found.items()})
    tokens = round(statistics.mean(lengths))
    rows = [row("knee", "full", 100 * right["full"] / count, "%", MEASURED, tokens, 91.9)]
    rows += [
        row("knee", f"{size} keys", 100 * right[way] / count, "%", MEASURED, tokens, KEYS.get(size))
        for size, way in ways.items()
    ]
    return {"rows": rows}


def repeats(study) -> dict:
    """14. A full pool when something has been fetched before: one of a document's first facts is asked for
    again and again, and the host has room for the document alone, so every later token drives one out."""
    model, tokenizer = study.load()
    right, count, out = dict.fromkeys(("no limit", *VICTIMS), 0), study.limit or 20, []
    for document, later, answer in asked_again(tokenizer, count):
        out.append(len(later) / len(document))
        for victim in right:
            limit = "" if victim == "no limit" else f",pool={len(document)},victim={victim}"
            way = f"infinigen:budget=0.2{limit}"
            right[victim] += answered(model, [document + later], [answer], [way], len(later))[way][0]
    label = f"{statistics.mean(out):.0%} of the document driven out"
    return {"rows": [
        row("repeats", f"{victim}, {label}", 100 * found / count, "%", MEASURED)
        for victim, found in right.items()
    ]}  # fmt: skip


EXPERIMENTS = {"turnover": turnover, "fetched": fetched, "columns": columns, "knee": knee, "repeats": repeats}
