"""Scoring through `full` is lm-eval's own HF model, on the workshop models, at any batch size.

tests/eval/test_accuracy.py has the same on a tiny model with a vocabulary of bytes.
"""

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

import kvlab
from eval.accuracy import KVLabLM
from eval.tasks.rows import needle, prose, recall
from kvlab.models.loading import EMBEDDED


def asked(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=one, idx=0, metadata=("t", i, 1))
        for i, one in enumerate(arguments)
    ]


@pytest.fixture(scope="module", params=EMBEDDED)
def models(request):
    """(makes ours of a batch size, lm-eval's), with a context of 512 tokens."""
    model, tokenizer = kvlab.load(request.param)
    own = AutoModelForCausalLM.from_pretrained(EMBEDDED[request.param], dtype=torch.float32)
    theirs = HFLM(pretrained=own, tokenizer=tokenizer, batch_size=2, device="cpu", max_length=512)

    def ours(size: int) -> KVLabLM:
        return KVLabLM(model, "full", tokenizer=tokenizer, batch_size=size, max_length=512)

    return ours, theirs


@pytest.mark.parametrize("size", [1, 7])
def test_choices(models, size):
    ours, theirs = models
    rows = [*recall()["test"].select(range(2)), needle()["test"][0]]
    wanted = asked("loglikelihood", [(r["context"], f" {c}") for r in rows for c in r["choices"]])
    for mine, other in zip(ours(size).loglikelihood(wanted), theirs.loglikelihood(wanted), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]


def test_whole_texts(models):
    """The second is longer than the context and comes in windows."""
    ours, theirs = models
    texts = [row["text"] for row in prose()["test"].select(range(3))]
    short, long = texts[0][:600], " ".join(texts)[:3000]
    assert len(theirs.tok_encode(short)) < 512 < len(theirs.tok_encode(long))
    wanted = asked("loglikelihood_rolling", [(short,), (long,)])
    expected = theirs.loglikelihood_rolling(wanted)
    assert ours(2).loglikelihood_rolling(wanted) == pytest.approx(expected, abs=1e-3)


def test_generation(models):
    ours, theirs = models
    options = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    prompts = [(row["context"], options) for row in recall()["test"].select(range(2))]
    prompts.append(("Once upon a time", options | {"until": [". The", "!"]}))
    expected = [theirs.generate_until(asked("generate_until", [one]))[0] for one in prompts]
    assert ours(4).generate_until(asked("generate_until", prompts)) == expected
