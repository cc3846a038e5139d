"""Where prompts are cut: an example for every row of the table, stored in docs/protocols.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cut_examples import EXAMPLES

from eval.accuracy.cuts import CUTS, REFUSED, boundary, character, cut_of, known
from eval.core.errors import Problem

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocols.md"


def printed(task: str) -> str:
    text, document = EXAMPLES[task]
    at = character(cut_of(task), task, text, document)
    return f"{task}: {text[:at]}|{text[at:]}".replace("\n", "\\n")


def test_every_row_has_a_stored_example():
    stored = PAGE.read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    assert stored.splitlines() == [printed(task) for task in EXAMPLES]
    for pattern in CUTS:
        assert any(re.fullmatch(pattern, task) for task in EXAMPLES), pattern
    assert all("|" in line and line.split(": ", 1)[1][0] != "|" for line in stored.splitlines())


@pytest.mark.parametrize("task", ["prose", "wikitext", "cloze", "squad_completion", "longbench_lcc"])
def test_where_nothing_is_to_be_cut_the_task_is_refused(task):
    with pytest.raises(Problem, match="no context to compress"):
        cut_of(task)
    assert not known(task) and any(re.fullmatch(pattern, task) for pattern in REFUSED)


def test_an_unknown_task_is_refused_until_its_user_says_where():
    with pytest.raises(
        Problem, match="--context-until TEXT, or as context_until under metadata: in its YAML"
    ):
        cut_of("my_task")
    assert character(cut_of("my_task", "ASK"), "my_task", "a ASK b ASK c", {}) == 8
    with pytest.raises(Problem, match="not found in the prompt"):
        character(cut_of("my_task", "ASK"), "my_task", "a b c", {})
    with pytest.raises(Problem, match="got none"):
        cut_of("my_task", "")


@pytest.mark.parametrize("task", ["piqa", "copa", "hellaswag", "mmlu_anatomy"])
def test_zero_shots_are_refused_where_the_shots_are_the_context(task):
    text, document = EXAMPLES[task]
    alone = text[character(cut_of(task), task, text, document) :]
    with pytest.raises(Problem, match="--num-fewshot"):
        character(cut_of(task), task, alone, document)


@pytest.mark.parametrize("at", range(0, 60, 7))
def test_the_cut_is_the_last_token_boundary_at_or_before_the_character(loaded, at):
    tokenizer, text = loaded[1], "Otis owns the brown dog — “loud”.\n\nQuestion:  the  dog\nAnswer: Otis, Ada"
    ids = tokenizer(text).input_ids
    count = boundary(tokenizer, ids, at)
    ends = [end for _, end in tokenizer(text, return_offsets_mapping=True).offset_mapping]
    assert count == max(1, sum(end <= at for end in ends))
    assert boundary(tokenizer, ids, len(text)) == len(ids) - 1
    assert boundary(tokenizer, ids[:1], 5) == 0
