"""The figures of a model's card, on models whose answers are known beforehand."""

import math
import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import kvlab
from course.recipes import cards
from eval.tasks import corpus


@pytest.fixture(scope="module")
def loaded():
    return kvlab.load("workshop", device="cpu")


def test_full_cache_agrees_with_one_pass(loaded):
    model, tokenizer = loaded
    one_pass, tokens = cards.accuracy(model, tokenizer, "chain 4", 6)
    caches = {"full": kvlab.make_cache(model, "full")}
    assert cards.accuracies(model, tokenizer, caches, "chain 4", 6) == {"full": one_pass}
    lengths = [len(tokenizer(d.text)["input_ids"]) for d in cards.documents("chain 4", 6)]
    assert tokens == sum(lengths) / 6


def test_only_the_named_layer_is_restricted(loaded):
    model, tokenizer = loaded
    cache = cards.restricted(model, "sinks:budget=8", 3)
    ids = tokenizer("The brown dog Otis slept by the river. " * 3, return_tensors="pt")["input_ids"]
    kvlab.decode(model, ids, cache, 3)
    held = [layer.rows_held[0] for layer in cache.layers]
    assert held[3] == 8 and {*held[:3], *held[4:]} == {ids.shape[1] + 2}


def test_documents_differ_between_tasks_and_are_fixed():
    first = [d.text for d in cards.documents("recall 8", 3)]
    assert first == [d.text for d in cards.documents("recall 8", 3)] and len(set(first)) == 3
    assert not set(first) & {d.text for d in cards.documents("separated 4", 3)}


def test_a_uniform_model_needs_the_bits_of_its_vocabulary(loaded):
    _, tokenizer = loaded

    class Uniform:
        device = "cpu"

        def __call__(self, input_ids, use_cache):
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4096))

    text = "The baker made soup."
    tokens = len(tokenizer(text)["input_ids"])
    bits = cards.bits_per_byte(Uniform(), tokenizer, [text])
    assert bits == pytest.approx(tokens * math.log2(4096) / len(text), rel=1e-5)


def test_block_inputs_alike(loaded):
    model, tokenizer = loaded
    text = " ".join(corpus.prose(random.Random(0), 3))
    found = cards.alike(model, tokenizer, [text])
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    inputs = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args, kwargs: inputs.append(args[0]), with_kwargs=True)
        for block in model.model.layers
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    expected = [torch.cosine_similarity(a, b, dim=-1).mean().item() for a, b in pairwise(inputs)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_passages_are_spread_over_the_texts():
    assert cards.passages(["abcde", "fg"], most=9, size=2) == ["ab", "cd", "e", "fg"]
    assert cards.passages(["abcde", "fg"], most=2, size=2) == ["ab", "e"]


def test_prints_every_table(monkeypatch, capsys, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The baker made soup. " * 5, encoding="utf-8")
    monkeypatch.setattr(
        cards, "TASKS", {"recall 20": cards.TASKS["recall 4"], "needle 250": cards.TASKS["recall 4"]}
    )
    monkeypatch.setattr(cards, "METHODS", ("full", "infinigen:budget=0.2"))
    for name in ("METHOD_TASKS", "LAYER_TASKS"):
        monkeypatch.setattr(cards, name, ("recall 20",))
    cards.main(["workshop", "--text", str(text), "--count", "5"])
    printed = capsys.readouterr().out
    for part in ("block inputs", "bits per byte", "> Once upon", "infinigen", "`sinks` in", "accuracy"):
        assert part in printed
