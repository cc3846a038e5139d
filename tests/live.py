"""What tests ask of the live page: documents, questions, and what kvlab answers to them."""

import json
import os
import random
import re
from dataclasses import dataclass

import torch

from course.page import build
from eval.tasks import corpus
from eval.tasks.words import ANIMALS, NAMES, PLACES
from kvlab.decode import Stepper
from kvlab.keep import Keep
from kvlab.make import make_cache

SEED = int(os.environ.get("KVLAB_PAGE_SEED", 0))  # `make fuzz` draws one
TIE = 1e-4  # logits closer than this are as good as each other
TOKENS = 16  # decoded after every prompt
PROTOCOLS = ("question-inside", "context-first")
FORMS = build.told()["forms"]


def told_of(rng: random.Random, form: str) -> corpus.Document:
    """As the page's own button makes facts: six, each in one of six forms; what is asked for is in `form`."""
    count = 6
    asked, names = rng.randrange(count), rng.sample(NAMES, count)
    keys, forms = corpus.keys(rng, count, ANIMALS), rng.choices(FORMS, k=count)
    forms[asked] = form
    facts = [
        form.format(key=key, value=name, place=rng.choice(PLACES))
        for form, key, name in zip(forms, keys, names, strict=True)
    ]
    question = f"\nQuestion: the {keys[asked]}"
    return corpus.Document("told", " ".join(facts), ((question, f" {names[asked]}"),), tuple(names))


def asked(document, method: str = "full", budget: float = 0.2, protocol: str = PROTOCOLS[0], **more) -> dict:
    question = document.questions[-1][0]
    known = {"facts": document.context, "question": question, "method": method, "budget": budget}
    return known | {"protocol": protocol, "count": TOKENS} | more


def decoded(model, spec, ids: list[int], context: int, hold: bool) -> dict:
    """What kvlab decodes when the first `context` tokens are compressed, those after them come in one pass
    and the last one is a step: tokens, by how much each was ahead, and what every pass held, moved and read.
    spec: a method, or a cache.
    """
    cache = make_cache(model, spec) if isinstance(spec, str) else spec
    stepper, seen = Stepper(model, cache), {"tokens": [], "leads": [], "held": [], "moved": [], "read": []}
    for layer in cache.attending:
        layer.on_read = lambda layer, held, fetched, query: seen["read"][-1].append(fetched)

    def feed(new: list[int]):
        seen["read"].append([])
        logits = stepper.feed(torch.tensor([new]), last=True)[0]
        slots = sum(layer.store.bytes_per_slot * sum(layer.rows_held) for layer in cache.attending)
        seen["held"].append(slots * cache.attending[0].kv_heads)
        seen["moved"].append(cache.stats().moved_bytes)
        return logits

    feed(ids[:context])
    if hold:
        cache.hold()
    if ids[context:-1]:
        feed(ids[context:-1])
    for _ in range(TOKENS):
        top = feed([seen["tokens"][-1] if seen["tokens"] else ids[-1]]).topk(2)
        seen["tokens"].append(int(top.indices[0]))
        seen["leads"].append(float(top.values[0] - top.values[1]))
    return seen


def said(given: list[int], wanted: dict) -> bool:
    """Whether these are the wanted tokens. Where two tokens are as good, rounding decides, and what follows
    is another text: it is not compared."""
    tie = next((i for i, lead in enumerate(wanted["leads"]) if lead < TIE), TOKENS)
    return given[:tie] == wanted["tokens"][:tie]


@dataclass(frozen=True)
class Without(Keep):
    """Everything but some positions."""

    gone: tuple[int, ...] = ()
    once = True

    def score(self, layer):
        there = torch.ones_like(layer.slot_positions)
        for position in self.gone:
            there = there.masked_fill(layer.slot_positions == position, 0)
        return there


def line(tokenizer, tokens: list[int]) -> str:
    """An answer as a reader sees it: to the end of its line."""
    text = tokenizer.decode(tokens)
    return re.split(r"\n|<\|end\|>", text.strip())[0].strip()


def shown_for(browser, document, **more) -> dict:
    """What the page shows when a reader has made these choices."""
    question = document.questions[-1][0].removeprefix("\nQuestion: ")
    given = {"facts": document.context, "question": question, "evicted": [], "step": None} | more
    browser.run(f"change({json.dumps(given)})")
    parts = (
        "{answer: $('answer').textContent, verdict: $('verdict').textContent, likely: $('likely').textContent"
    )
    return browser.run(f"({parts}, word: $('answer').querySelector('strong').textContent}})") | {
        "asked": question
    }


def key(browser, name: str, text: str = "") -> None:
    """Press a key as a person does who has no mouse."""
    number = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Escape": 27}[name]
    code = {"key": name, "code": name.replace(" ", "Space"), "windowsVirtualKeyCode": number}
    browser.call("Input.dispatchKeyEvent", type="keyDown", text=text, **code)
    browser.call("Input.dispatchKeyEvent", type="keyUp", **code)
