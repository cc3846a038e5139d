"""What is kept of every document: question, gold, answer, and what was held of the evidence."""

import json

import pytest
import torch

import kvlab
from eval.accuracy.batching import shares_held
from eval.command import main
from eval.core.results import Store

pytestmark = pytest.mark.usefixtures("no_pictures")


def run(folder, out, *words: str) -> list[tuple[dict, list[dict]]]:
    """(cell, its samples) of a run."""
    base = ["accuracy", "--model", str(folder), "--jobs", "0", "--limit", "3", "--out", str(out)]
    assert main([*base, *words]) == 0
    store = Store(out)
    return [(cell, store.samples(cell)) for cell in store.records()]


FACTS = "The red hen Otis likes the barn. The old cow Ada likes the well. Tom went home and cut the wood."
MANY = [
    {"context": f"{FACTS}\nQuestion: {ask}", "choices": ["Ada", "Otis"], "label": int(name == "Otis")}
    for ask, name in (("the red hen", "Otis"), ("the old cow", "Ada"))
]


@pytest.mark.parametrize(
    ("task", "protocol"),
    [
        ("recall", "question-inside"),
        ("chain", "context-first"),
        ("recall_em", "context-first"),
        ("recall_many", "many-questions"),
        ("recall_many", "reuse"),
    ],
)
def test_what_was_asked_answered_and_held(folder, tmp_path, task, protocol):
    methods = ["--methods", "full", "sinks:budget=8", "recompute", "--protocol", protocol]
    if task == "recall_many":
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in MANY))
        methods += ["--data", f"recall_many={tmp_path / 'rows.jsonl'}"]
    for cell, samples in run(folder, tmp_path / "out", "--tasks", task, *methods):
        assert [one["doc_id"] for one in samples] == [*range(len(samples))] and len(cell["samples"]) == 16
        assert [one["right"] for one in samples] == cell["values"][cell["metrics"][0]["metric"]]
        for one in samples:
            assert one["question"].startswith("Question: ") and "prompt" not in one
            if task == "recall_em":
                assert isinstance(one["answer"], str) and "choices" not in one
            else:
                assert max(one["choices"], key=lambda pair: pair[1])[0] == one["answer"]
            if cell["method"] == "recompute":
                assert "evidence" not in one
                continue
            assert len(one["evidence"]) == (2 if task == "chain" else 1)
            for sentence in one["evidence"]:
                said, shares = "".join(sentence["tokens"]), sentence["held"]
                assert one["gold"].split(", ")[-1].casefold() in said.casefold() or task == "chain"
                assert len(shares) == len(sentence["tokens"]) and {*shares} <= {0.0, 1.0}
                assert all(shares) == (cell["method"] == "full")


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_those_of_the_positions(loaded, seed):
    """Rows of several lengths, under a keep whose heads hold other tokens."""
    torch.manual_seed(seed)
    model, _ = loaded
    lengths = torch.randint(8, 40, (3,)).tolist()
    rows = [torch.randint(1, 300, (count,)) for count in lengths]
    ids = torch.stack([torch.nn.functional.pad(row, (40 - len(row), 0)) for row in rows])
    mask = torch.stack([(torch.arange(40) >= 40 - count).long() for count in lengths])
    cache = kvlab.make_cache(model, "h2o:budget=0.4")
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    wanted = [torch.randperm(count)[: seed + 2].tolist() for count in lengths]
    wanted[1] = []
    for row, (tokens, found) in enumerate(zip(wanted, shares_held(cache, wanted), strict=True)):
        for token, share in zip(tokens, found, strict=True):
            held = [(layer.positions[row] == token).any(-1).float().mean() for layer in cache.attending]
            assert share == pytest.approx(float(sum(held)) / len(held), abs=1e-3)
