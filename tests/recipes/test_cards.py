"""The figures of a model's card, on models whose answers are known beforehand."""

import pytest

import kvlab
from course.recipes import cards


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
