"""The live page says what kvlab says with the same int8 weights: the same text, the same tokens.

Names and facts are drawn anew in every run; a failure prints the seed, and KVLAB_PAGE_SEED repeats it.
"""

from __future__ import annotations

import json
import os
import random

import pytest
import torch

import kvlab
from course.page import build
from eval.tasks import corpus
from eval.tasks.words import EVAL_NAMES, NAMES
from kvlab.decode import Stepper
from kvlab.methods import make_cache

SEED = int(os.environ.get("KVLAB_PAGE_SEED") or random.SystemRandom().randrange(10**6))
TOKENS = 16  # decoded after every prompt
METHODS = ("full", "int4", "int2", "sinks", "h2o", "snapkv", "topk", "infinigen")
PROTOCOLS = ("question-inside", "context-first")


@pytest.fixture(scope="module")
def rounded():
    """The workshop model with the page's weights, and its tokenizer."""
    model, tokenizer = kvlab.load()
    return build.rounded(model), tokenizer


@pytest.fixture(scope="module")
def file(rounded, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(build.page(*rounded), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["", "#plain"], ids=["simd", "plain"])
def opened(request, file, browser):
    """The page in Chromium, once with the WASM kernel and once with plain JavaScript."""
    browser.open(file.as_uri() + request.param)
    loaded = browser.run("ready.then(({found}) => found)")
    assert loaded == {"simd": request.param == ""}
    return browser


def documents(count: int, facts: int = 6) -> list[corpus.Document]:
    """Facts and a question about one of them; half of the names are in no fact of its training."""
    rng = random.Random(SEED)
    return [corpus.recall(rng, facts=facts, names=[*NAMES[:32], *EVAL_NAMES]) for _ in range(count)]


def ask(browser, what: str, given: dict, pick: str = "found"):
    """What the page's worker answers; pick: an expression of `found`, evaluated in the page."""
    return browser.run(f"client.ask({json.dumps(what)}, {json.dumps(given)}).then(({{found}}) => {pick})")


def asked(document, method: str = "full", budget: float = 0.2, protocol: str = PROTOCOLS[0], **more) -> dict:
    question = document.questions[-1][0]
    known = {"facts": document.context, "question": question, "method": method, "budget": budget}
    return known | {"protocol": protocol, "count": TOKENS} | more


def test_the_tokenizer_is_the_models(opened, rounded):
    rng = random.Random(SEED)
    odd = "a bZ9'sll  \n\t é漢🙂'\u0085\ufeff\u00a0<|end|>-_$"
    texts = [document.text for document in documents(20)]
    texts += ["".join(rng.choices(odd, k=rng.randrange(1, 30))) for _ in range(200)] + [
        "<|end|> and <|pad|>x"
    ]
    got = opened.run(
        f"Promise.all({json.dumps(texts)}.map((text) => client.ask('encode', {{text}}).then((a) => a.found)))"
    )
    wrong = [text for text, ids in zip(texts, got, strict=True) if ids != rounded[1](text).input_ids]
    assert not wrong, f"seed {SEED}"
    ids = rounded[1](texts[0]).input_ids
    assert ask(opened, "decode", {"ids": ids}) == texts[0]


def greedy(model, cache, context: list[int], rest: list[int], last: int) -> tuple[list[int], list[float]]:
    """What kvlab decodes after the prompt in three passes, and by how much every token was ahead."""
    stepper, tokens, leads = Stepper(model, cache), [], []
    for ids in filter(None, (context, rest)):
        stepper.feed(torch.tensor([ids]), last=True)
    for _ in range(TOKENS):
        top = stepper.feed(torch.tensor([[tokens[-1] if tokens else last]]), last=True)[0].topk(2)
        tokens.append(int(top.indices[0]))
        leads.append(float(top.values[0] - top.values[1]))
    return tokens, leads


def test_the_full_cache_says_what_kvlab_says(opened, rounded):
    model, tokenizer = rounded
    for document in documents(5):
        found = ask(opened, "run", asked(document), "({ids: found.ids, answer: found.answer})")
        ids = tokenizer(document.text).input_ids
        assert found["ids"] == ids
        tokens, _ = greedy(model, make_cache(model, "full"), ids[:-1], [], ids[-1])
        assert found["answer"] == tokens, f"seed {SEED}: {document.text}"


def test_the_page_asks_nothing_of_anybody(opened):
    assert opened.errors == []
    assert not [x for x in opened.requests if not x.startswith(("file:", "data:", "blob:"))]
    assert len([x for x in opened.requests if x.startswith("file:")]) == 1
