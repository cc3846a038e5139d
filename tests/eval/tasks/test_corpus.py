"""The generated documents: answers stand in the text, seeds fix it, evaluation words stay apart."""

import json
import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval.tasks import corpus, words
from kvlab.models import EMBEDDED

ROOT = Path(__file__).resolve().parents[3]
MAKERS = {
    "named": lambda rng: corpus.recall(rng, 8, "named", questions=3),
    "called": lambda rng: corpus.recall(rng, 8, "called"),
    "in": lambda rng: corpus.recall(rng, 8, "in"),
    "put": lambda rng: corpus.recall(rng, 8, "put", filler=corpus.prose(rng, 5)),
    "met": lambda rng: corpus.recall(rng, 8, "met"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_seed_fixes_text_and_answer_stands_in_it(name):
    first, again, other = (MAKERS[name](random.Random(seed)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert first.answer.startswith(" ") and first.answer.strip() in first.choices
    assert f" {first.answer.split()[-1]}" in first.context
    assert first.text.startswith(first.context) and first.text.endswith(first.questions[-1][0])
    assert len(set(first.choices)) == len(first.choices)


@pytest.mark.parametrize("name", ["named", "called", "in", "put", "met"])
def test_question_repeats_a_key_that_is_stated_once(name):
    document = corpus.recall(random.Random(1), 12, name, questions=12)
    assert len(document.questions) == 12
    for question, answer in document.questions:
        key = " ".join(question.removesuffix(" is called").removesuffix(" is in the").split()[-2:])
        assert document.context.count(key) == 1
        assert document.context.index(key) < document.context.index(answer)


def test_lists_are_large_and_disjoint():
    assert len(words.NAMES) >= 100 and len(words.PLACES) >= 50
    assert not set(words.NAMES) & set(words.EVAL_NAMES)
    assert not set(words.PLACES) & set(words.EVAL_PLACES)
    assert not set(corpus.WORDINGS) & set(corpus.EVAL_WORDINGS)


@pytest.mark.parametrize("task", ["recall", "needle", "chain"])
def test_the_answer_of_a_row_is_among_its_choices_and_in_its_text(task):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED["workshop"])
    for line in (ROOT / "eval/tasks/data" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert row["choices"][row["label"]] == row["answer"]
        assert 4 <= len(row["choices"]) <= 8
        last = [" " + choice.split()[-1] for choice in row["choices"]]
        assert all(word in row["context"] for word in last)
        assert all(len(ids) == 1 for ids in tokenizer(last)["input_ids"])
