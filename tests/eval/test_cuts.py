"""Where prompts are cut: an example for every row of the table, stored in docs/protocols.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eval.accuracy.cuts import CUTS, REFUSED, boundary, character, cut_of, known
from eval.core.errors import Problem

PAGE = Path(__file__).resolve().parents[2] / "docs" / "protocols.md"
SHOT = "Question: how to dry a coat\nAnswer: hang it up\n\n"
STORY = "Ada has a red boat. She keeps it in the shed."
LONG = "Read the following text.\n\n{context}\n\nNow, answer this question.\n\nQuestion: {question}\nAnswer:"
EXAMPLES = {  # task -> (prompt as lm-eval builds it, document)
    "recall": ("Otis owns the dog.\nQuestion: the dog", {}),
    "needle_em": ("It rained all day. Otis owns the dog.\nQuestion: the dog", {}),
    "chain": ("Otis owns the dog. The dog sleeps in the barn.\nQuestion: the barn", {}),
    "piqa": (f"{SHOT}Question: cool some tea\nAnswer:", {"goal": "cool some tea"}),
    "arc_easy": (f"{SHOT}Question: What melts ice?\nAnswer:", {"question": "What melts ice?"}),
    "openbookqa": ("Ice melts in the\nsun\n\nA seed grows in", {"question_stem": "A seed grows in"}),
    "copa": (
        "It rained therefore the grass was wet\n\nTom fell because",
        {"premise": "Tom fell.", "question": "cause"},
    ),
    "hellaswag": (
        "Cooking: She stirs the soup.\n\nSewing: He takes a needle. He",
        {"query": "Sewing: He takes a needle. He"},
    ),
    "winogrande": (
        "Ann thanked May because May had helped.\n\nThe cup broke the shelf because the cup",
        {"sentence": "The cup broke the shelf because the _ was heavy."},
    ),
    "rte": (
        "A dog sleeps.\nQuestion: An animal sleeps. True or False?\nAnswer:",
        {"sentence1": "A dog sleeps."},
    ),
    "sglue_rte": ("A dog sleeps.\nQuestion: It runs. True or False?\nAnswer:", {"premise": "A dog sleeps."}),
    "boolq": (f"{STORY}\nQuestion: is the boat red?\nAnswer:", {"passage": STORY}),
    "lambada_openai": (
        "The cat slept. Then it woke and drank its",
        {"text": "The cat slept. Then it woke and drank its milk"},
    ),
    "squadv2": (
        f"Title: Boats\n\nBackground: {STORY}\n\nQuestion: Who has it?\n\nAnswer:",
        {"context": STORY},
    ),
    "drop": (f"{STORY} How many boats are there?", {"passage": STORY}),
    "race": (f"Article: {STORY}\n\nQuestion: Whose is it?\nAnswer: Ada's\nThe boat is _", {"article": STORY}),
    "coqa": (f"{STORY}\n\nQ: Who has it?\n\nA: Ada\n\nQ: Where is it?\n\nA:", {"story": STORY}),
    "niah_single_1": (
        "A special magic number is hidden within the following text. The magic number for ant is: 7.\n"
        "What is the special magic number for ant mentioned in the provided text?",
        {},
    ),
    "niah_multivalue": (
        "Some special magic numbers are hidden within the following text. One for ant is: 7.\n"
        "What are all the special magic numbers for ant mentioned in the provided text?",
        {},
    ),
    "ruler_vt": ("VAR A = 5 VAR B = VAR A\nQuestion: Find all variables that are assigned the value 5.", {}),
    "ruler_cwe": ("1. ant 2. bee 3. ant\nQuestion: What are the 10 most common words in the above list?", {}),
    "ruler_fwe": ("abc ... abc ...\nQuestion: Do not provide any explanation. What are the words?", {}),
    "longbench_multifieldqa_en": (LONG.format(context=STORY, question="Who has it?"), {"context": STORY}),
    "longbench_gov_report": (
        f"Report:\n{STORY}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        {"context": STORY},
    ),
    "longbench_trec": (f"Here are some examples.\n\n{STORY}\nQuestion: Who?", {"context": STORY}),
    "gsm8k": (
        f"{SHOT}Question: Ada has 2 boats. She buys 3. How many has she?\nAnswer:",
        {"question": "Ada has 2 boats. She buys 3. How many has she?"},
    ),
    "gsm8k_cot": (f"{SHOT}Question: What is 2 + 3?\nAnswer:", {"question": "What is 2 + 3?"}),
    "mmlu_anatomy": (
        "Which one beats?\nA. heart\nB. bone\nC. hair\nD. nail\nAnswer: A\n\n"
        "Which one bends?\nA. knee\nB. skull\nC. nail\nD. tooth\nAnswer:",
        {"question": "Which one bends? "},
    ),
}


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
