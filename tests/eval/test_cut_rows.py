"""Every row of the table of cuts under `full`: all protocols say the same, and its cut really cuts.

Two questions on one context for every row, so that many-questions and reuse have something to share.
"""

from __future__ import annotations

import re

import pytest
from cut_examples import EXAMPLES, OTHERS, WRITTEN
from lm_eval.api.instance import Instance

from eval.accuracy import KVLabLM
from eval.accuracy.batching import TAIL
from eval.accuracy.boundaries import character, rule_of
from eval.accuracy.protocols import FIRST, INSIDE, MANY, PROTOCOLS

CHOICES = (" Ada", " in the old shed", " in the boat")
GREEDY = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}


def prompts(task: str) -> tuple[str, list[tuple[str, dict]]]:
    """(the context, [(prompt, document)]) of a row: its example, and another question on the same context."""
    text, document = EXAMPLES[task]
    context = text[: character(rule_of(task), task, text, document)]
    tail, other = OTHERS[task]
    return context, [(text, document), (context + tail, other)]


def instances(task: str, kind: str, arguments) -> list[Instance]:
    """A request for every prompt of a row and each of these further arguments."""
    return [
        Instance(request_type=kind, doc=doc, arguments=(text, one), idx=place, metadata=(task, place, 1))
        for place, (text, doc) in enumerate(prompts(task)[1])
        for one in arguments
    ]


def asked(loaded, tasks, protocol: str, method="full", answers=CHOICES, **how):
    """(log-likelihoods, a model that gave them)."""
    lm = KVLabLM(loaded[0], method, tokenizer=loaded[1], protocol=protocol, **how)
    wanted = [one for task in tasks for one in instances(task, "loglikelihood", answers)]
    return [score for score, _ in lm.loglikelihood(wanted, disable_tqdm=True)], lm


def written(loaded, task: str, protocol: str, **how) -> list[str]:
    lm = KVLabLM(loaded[0], "full", tokenizer=loaded[1], protocol=protocol, **how)
    return lm.generate_until(instances(task, "generate_until", [GREEDY]), disable_tqdm=True)


def test_every_row_has_another_question_on_its_context():
    assert OTHERS.keys() == EXAMPLES.keys()
    for task in EXAMPLES:
        context, ((text, _), (other, document)) = prompts(task)
        assert character(rule_of(task), task, other, document) == len(context), task
        assert other != text and context.strip(), task


@pytest.mark.parametrize("task", EXAMPLES)
def test_under_full_every_protocol_says_the_same(precise, task):
    answers = CHOICES
    if re.fullmatch(WRITTEN, task):
        texts = written(precise, task, INSIDE)
        answers = (*CHOICES, *{f" {text.strip()}" for text in texts if text.strip()})
        for protocol in PROTOCOLS:
            assert written(precise, task, protocol, batch_size=1) == texts, protocol
    expected, _ = asked(precise, [task], INSIDE, answers=answers)
    assert len({round(one, 3) for one in expected}) > len(CHOICES)  # both questions count
    counts = prefilled(precise, task)
    for protocol in PROTOCOLS:
        found, lm = asked(precise, [task], protocol, answers=answers)
        assert found == pytest.approx(expected, abs=1e-7), protocol
        count = sum(scorer.prefilled for scorer, *_ in lm._known.values())
        assert count == counts.get(protocol, count), protocol


def prefilled(precise, task) -> dict[str, int]:
    """Tokens that a protocol compresses, by the tokenizer's offsets; one across the cut belongs to the
    question."""
    context, texts = prompts(task)
    tokens, whole = [], []
    for text, _ in texts:
        ends = [end for _, end in precise[1](text, return_offsets_mapping=True).offset_mapping]
        tokens.append(sum(end <= len(context) for end in ends))
        whole.append(len(ends))
    assert tokens[0] == tokens[1] and 0 < tokens[0] < min(whole) - TAIL
    return {INSIDE: sum(whole) - 2 * TAIL, FIRST: sum(tokens), MANY: tokens[0]}


@pytest.mark.parametrize("task", [*EXAMPLES][::6])
def test_what_gives_something_up_is_seen(precise, task):
    """The comparison above can fail: what drops tokens answers otherwise where the question is inside."""
    inside, first = (asked(precise, [task], protocol, "sinks:budget=4")[0] for protocol in (INSIDE, FIRST))
    assert max(abs(a - b) for a, b in zip(inside, first, strict=True)) > 1e-2
