"""Where prompts are cut: the examples of docs/protocols.md, one for every row of the table."""

import re

import pytest
from cut_examples import CHATS, CUT, EXAMPLES, SHOT, chat, chatting, stored
from lm_eval.api.instance import Instance

import kvlab
from eval.accuracy import KVLabLM
from eval.accuracy.boundaries import REFUSED, RULES, boundary, character, known, rule_of
from eval.core.errors import Problem


@pytest.mark.parametrize("task", EXAMPLES)
def test_an_example_is_cut_where_the_page_says(task):
    text, document = EXAMPLES[task]
    assert character(rule_of(task), task, text, document) == CUT[task].index("|") > 0


def test_every_row_has_an_example():
    for pattern in RULES:
        assert any(re.fullmatch(pattern, task) for task in EXAMPLES), pattern


@pytest.mark.parametrize(
    "task", ["prose", "wikitext", "cloze", "lambada_openai_cloze_yaml", "squad_completion", "longbench_lcc"]
)
def test_where_nothing_is_to_be_cut_the_task_is_refused(task):
    with pytest.raises(Problem, match="no context to compress"):
        rule_of(task)
    assert not known(task) and any(re.fullmatch(pattern, task) for pattern in REFUSED)


@pytest.mark.parametrize(
    ("lead", "before"), [("Question: ", 9), ("Q: ", 9), ("Solve.\nProblem: ", 16), ("", 9)]
)
def test_a_problem_of_one_sentence_is_cut_before_its_item(lead, before):
    document, cut = {"question": "What is 2 + 3?"}, rule_of("gsm8k_cot_llama")
    text = f"Shots.\n\n\n{lead}What is 2 + 3?\nA:"
    assert character(cut, "gsm8k_cot_llama", text, document) == before
    with pytest.raises(Problem, match="not found in the prompt"):  # no shots: nothing is before it
        character(cut, "gsm8k_cot_llama", "Q: What is 2 + 3?\nA:", document)


def test_an_unknown_task_is_refused_until_its_user_says_where():
    with pytest.raises(
        Problem, match=r"--context-until TEXT \(.*=TEXT\), or as context_until under metadata: in its YAML"
    ):
        rule_of("my_task")
    assert character(rule_of("my_task", "ASK"), "my_task", "a ASK b ASK c", {}) == 8
    with pytest.raises(Problem, match="not found in the prompt"):
        character(rule_of("my_task", "ASK"), "my_task", "a b c", {})
    with pytest.raises(Problem, match=r"a shell writes a line break as \$'\\n'"):
        character(rule_of("my_task", r"\nASK"), "my_task", "a\nASK b", {})
    with pytest.raises(Problem, match="got none"):
        rule_of("my_task", "")


@pytest.mark.parametrize("task", ["piqa", "copa", "hellaswag", "mmlu_anatomy", "mmlu_anatomy_continuation"])
def test_zero_shots_are_refused_where_the_shots_are_the_context(task):
    text, document = EXAMPLES[task]
    alone = text[character(rule_of(task), task, text, document) :]
    with pytest.raises(Problem, match="--num-fewshot"):
        character(rule_of(task), task, alone, document)
    described = f"The following are questions.\n\n{alone}"  # which is no example either
    for shots in (0, 1):
        if shots:
            character(rule_of(task), task, described, document, shots=shots)
        else:
            with pytest.raises(Problem, match="--num-fewshot"):
                character(rule_of(task), task, described, document, shots=shots)


def halves(tokenizer) -> list[tuple[str, str]]:
    """(what is compressed, the question) of every chat, decoded from the tokens on either side."""
    found = []
    for task, turns in CHATS:
        text, document = chat(tokenizer, task, turns)
        ids = tokenizer(text).input_ids
        count = boundary(tokenizer, text, ids, character(rule_of(task), task, text, document))
        found.append((tokenizer.decode(ids[:count]), tokenizer.decode(ids[count:])))
    return found


def test_a_prompt_in_a_template_is_cut_where_it_would_be_without_one():
    """With a system turn and shots as turns, too: special tokens are characters of the prompt."""
    found = halves(chatting(kvlab.load()[1]))
    lines = [(task, f"{one}|{other}") for (task, _), (one, other) in zip(CHATS, found, strict=True)]
    assert lines == stored("as a shot:")
    for (task, turns), (context, question) in zip(CHATS, found, strict=True):
        text, document = EXAMPLES[task]
        asked = text[character(rule_of(task), task, text, document) :]
        assert question.strip() == f"{asked.strip()}<|im_end|>\n<|im_start|>assistant", task
        assert context.count("<|im_start|>") == len(turns) + 1


def test_lambadas_of_other_names_are_not_guessed():
    assert known("lambada_openai_mt_de") and not known("lambada_mine")


def test_a_sentence_that_begins_with_its_gap_is_cut_before_the_choice():
    document, cut = {"sentence": "_ was too big for it."}, rule_of("winogrande")
    assert character(cut, "winogrande", "Ann had it.\n\nThe cup", document) == 13
    with pytest.raises(Problem):
        character(cut, "winogrande", "The cup", document)


def test_a_hypothesis_that_says_the_premise_again_is_not_the_context():
    text = "Premise A.\nQuestion: He said Premise A. True or False?\nAnswer:"
    assert character(rule_of("rte"), "rte", text, {"sentence1": "Premise A."}) == len("Premise A.")


def test_zero_shots_are_refused_under_a_template_too(loaded):
    """What a template puts before every prompt is no example."""
    lm = KVLabLM(loaded[0], "full", tokenizer=chatting(loaded[1]), protocol="context-first")
    text, document = chat(lm.tokenizer, "piqa", [])
    asked = {"doc": document, "idx": 0, "metadata": ("piqa", 0, 1)}
    lm._cut([Instance("loglikelihood", arguments=(text, " a"), **asked)])
    with pytest.raises(Problem, match="--num-fewshot"):
        lm._cut([Instance("loglikelihood", arguments=(text.replace(SHOT, ""), " a"), **asked)])
