"""The explorer: one HTML page, without a server, that shows what a cache holds while the workshop
model answers a question.

    python -m course.teaching.explorer --out explorer.html

Everything on the page is a recording: the model reads a few facts (the prefill), then a question arrives
token by token, then the model answers, once for every method, budget and question. Because the question
comes after the prefill, no method knows what will be asked when it decides what to keep.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import random
from pathlib import Path

import jinja2
import torch
from torch import Tensor

from eval.tasks import corpus
from kvlab.decode import Stepper
from kvlab.methods import METHODS, make_cache
from kvlab.models import WORKSHOP, load

from .pictures import STATES
from .trace import LastRead, token_states

SHOWN = ("full", "sinks", "h2o", "topk", "infinigen")
BUDGETS = (0.05, 0.1, 0.2, 0.4, 0.8)  # fractions of the tokens; `full` has no budget
FACTS, AFTER, SEEDS = 8, 2, 20  # facts told, tokens decoded after the answer, documents to choose from


@torch.no_grad()
def record(model, tokenizer, facts: list[int], question: list[int], cache, full: dict | None = None) -> dict:
    """Prefill the facts, feed the question token by token, then decode greedily; returns what was seen.

    Row 0 is the prefill, row i the i-th token after it. `fed` and `best` per row: the token fed, and the
    three likeliest next tokens with their probabilities in per cent. `states` and, without `full`, `paid`:
    per layer, KV head and row one digit per token: its state (an index into `pictures.STATES`), and nine
    times the square root of the attention it received. `missed`: per layer, KV head and row the per cent of
    the attention in the recording `full` that falls on tokens this head could not read, as long as both
    were fed the same tokens.
    """
    stepper, reads = Stepper(model, cache), [LastRead(layer) for layer in cache.layers]
    layers, heads = len(cache.layers), cache.layers[0].kv_heads
    run = {"fed": [], "best": [], "ids": []}
    run |= {name: [[[] for _ in range(heads)] for _ in range(layers)] for name in ("states", "missed")}
    received = []  # per row: [layers, kv_heads, tokens], from row 1 on
    coming = [facts, *([token] for token in question)]
    for row in range(1 + len(question) + AFTER):
        ids = coming[row]
        for read in reads:
            read.forget()
        logits = stepper.feed(torch.tensor([ids], device=model.device), last=True)
        chance, top = logits[0].softmax(-1).topk(3)
        if len(coming) == row + 1:
            coming.append([int(top[0])])
        run["ids"].append(ids)
        run["fed"].append(tokenizer.decode(ids[-1:]))
        run["best"].append([[tokenizer.decode([t]), round(100 * p)] for t, p in zip(top, chance.tolist())])
        if full is None and row > 0:
            received.append(torch.cat(list(map(_received, cache.layers, reads))).cpu())
        alike = row > 0 and (full is None or full["ids"][: row + 1] == run["ids"])
        for i, layer in enumerate(cache.layers):
            for head, states in enumerate(token_states(layer, reads[i])):
                run["states"][i][head].append(_digits(states))
            if alike and full is not None:
                for head, part in enumerate(_seen(full["received"][row - 1][i], reads[i].positions[0])):
                    run["missed"][i][head].append(round(100 * (1 - part)))
    if full is None:
        run["received"] = received
        run["paid"] = [
            [[_digits((9 * row[i, h].sqrt()).round().int()) for row in received] for h in range(heads)]
            for i in range(layers)
        ]
    return run


def _received(layer, read: LastRead) -> Tensor:
    """The attention that every held token received from the last query, mean over the query heads of its KV
    head, `[batch, kv_heads, tokens]`. For a layer that holds everything."""
    keys, _ = layer.store.read(read.query.device)
    query = read.query.unflatten(1, (layer.kv_heads, -1)).squeeze(3)  # [batch, kv_heads, group, head_dim]
    return (query @ keys.transpose(-1, -2) * layer.scaling).softmax(-1).mean(2)


def _seen(received: Tensor, positions: Tensor) -> list[float]:
    """The part of the attention `received` `[kv_heads, tokens]` that is on `positions` `[kv_heads, n]`."""
    there = received.gather(1, positions.clamp(min=0).long().cpu())
    return there.masked_fill(positions.cpu() < 0, 0.0).sum(-1).tolist()


def _digits(row: Tensor) -> str:
    return "".join(map(str, row.tolist()))


def scene(seed: int) -> tuple[str, list[dict]]:
    """Facts, and questions about the first, a middle and the last of them; nothing but the seed matters."""
    document = corpus.recall(random.Random(seed), facts=FACTS, questions=FACTS)
    asked = {answer.strip(): text for text, answer in document.questions}
    wanted = {"the first fact": 0, "a middle fact": FACTS // 2, "the last fact": FACTS - 1}
    values = document.choices
    return document.context, [
        {"about": about, "text": asked[values[i]], "answer": " " + values[i]} for about, i in wanted.items()
    ]


def recordings(model, tokenizer) -> dict:
    """All that the page shows, as plain lists and strings (see `record`).

    The facts are the first document, by seed, about which the full cache answers every question (if there is
    none, the first document).
    """
    for seed in [*range(SEEDS), 0]:
        text, questions = scene(seed)
        facts = tokenizer(text).input_ids
        for question in questions:
            ids = tokenizer(question["text"]).input_ids
            question["row"] = len(ids)  # after this row the answer is due
            question["at"] = facts.index(tokenizer(question["answer"]).input_ids[0])
            full = record(model, tokenizer, facts, ids, make_cache(model, "full"))
            question["runs"] = {"full": [full]}
        if all(said(q, q["runs"]["full"][0]) == q["answer"] for q in questions):
            break
    for question in questions:
        ids, full = tokenizer(question["text"]).input_ids, question["runs"]["full"][0]
        for name in SHOWN[1:]:
            question["runs"][name] = [
                record(model, tokenizer, facts, ids, make_cache(model, f"{name}:budget={budget}"), full)
                for budget in BUDGETS
            ]
        question["paid"], question["reader"] = full.pop("paid"), _reader(full.pop("received"), question)
    cache = make_cache(model, "full")
    return {
        "facts": [tokenizer.decode([token]) for token in facts],
        "questions": questions,
        "budgets": BUDGETS,
        "methods": {name: METHODS[name].summary for name in SHOWN},
        "layers": len(cache.layers),
        "heads": cache.layers[0].kv_heads,
    }


def _reader(received: list[Tensor], question: dict) -> dict:
    """The head that, with the full cache, looks most at the answer's token when the answer is due."""
    paid = received[question["row"] - 1][:, :, question["at"]]  # [layers, kv_heads]
    layer, head = divmod(int(paid.argmax()), paid.shape[1])
    return {"layer": layer, "head": head, "percent": round(100 * float(paid[layer, head]))}


def said(question: dict, run: dict) -> str:
    """The model's answer: its likeliest token once the whole question has been fed."""
    return run["best"][question["row"]][0][0]


def weights() -> str:
    """The first digits of the sha256 of the workshop model's weights, which the page carries."""
    return hashlib.sha256((WORKSHOP / "checkpoint" / "model.safetensors").read_bytes()).hexdigest()[:16]


def page(data: dict) -> str:
    """The page as one string of HTML; it asks nothing of the network and needs no other file."""
    packed = gzip.compress(json.dumps(data, separators=(",", ":")).encode(), compresslevel=6, mtime=0)
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=folder, autoescape=True).get_template("explorer.html.j2")
    return template.render(
        data=base64.b64encode(packed).decode(), digest=weights(), states=STATES, about=data
    )


def main(given=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m course.teaching.explorer", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the HTML file to write")
    out = parser.parse_args(given).out
    torch.set_num_threads(1)  # the fastest for a model this small
    html = page(recordings(*load()))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(html, encoding="utf-8")
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}")
    print(f"{out}: {len(html) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
