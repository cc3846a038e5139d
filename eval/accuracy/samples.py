"""Samples: the question, a method's answer, and the tokens of the evidence that it still held.

OUT/samples/NAME.jsonl is beside OUT/cells/NAME.json; `Store.samples(cell)` reads it. It has a line for each
document (by default for the first 1000), with

    doc_id     the document's number in its task
    question   the end of the prompt: from where its context ends, at most 400 characters
    prompt     the whole prompt; only with --log-samples whole
    gold       the right answer, or a list of them
    answer     the text that was written, or the likeliest choice; where a given text is scored, its
               log-likelihood
    choices    [[choice, log-likelihood], ...], where there are choices
    right      the document's value of the cell's first metric, mostly 1 or 0
    evidence   [{"tokens": [text, ...], "held": [share, ...]}, ...]: the sentences of the context that have a
               right answer in them, and for each token the share of layers and KV heads that held it when the
               prompt, or its context, had been compressed. Only for tasks that know their evidence (recall,
               needle, chain, needles_*, RULER's), not where a prompt too long for the model lost it, and not
               for `recompute`, which holds nothing
"""

from __future__ import annotations

import re
from itertools import islice

from .boundaries import ends_of, rule_of

SHORT, WHOLE, NONE = "short", "whole", "none"
MOST = 1000  # documents whose samples are kept where they are short
END = 400  # characters of a question
KNOWN = r"(recall|needle|chain)(_em|_many)?|needles_\w+|niah_\w+|ruler_(vt|qa_\w+)"  # tasks with evidence
SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?]+|\n|\Z)")
SENTENCES = 8  # of a prompt, at most


def rows(task, samples: list[dict], metric: str, whole: bool, held: dict[str, list[dict]]) -> list[dict]:
    """The lines of a cell, from lm-eval's own samples. held: {prompt: its `evidence`}."""
    found = []
    for row in samples if whole else samples[:MOST]:
        prompt, document = row["arguments"][0][0], row["doc"]
        line = {"doc_id": row["doc_id"], "question": question(task.task_name, prompt, document)}
        line |= {"prompt": prompt} if whole else {}
        line |= {"gold": gold(task, document)} | answer(task, row) | {"right": row.get(metric)}
        found.append(line | ({"evidence": held[prompt]} if held.get(prompt) else {}))
    return found


def question(name: str, prompt: str, document: dict) -> str:
    """The end of a prompt, from where its context ends if that is known."""
    return prompt[context(name, prompt, document) or 0 :].strip()[-END:]


def context(name: str, prompt: str, document: dict) -> int | None:
    """The character at which a prompt's context ends, if that is known."""
    try:
        return rule_of(name).find(prompt, document)
    except ValueError:
        return None


def gold(task, document: dict) -> str | list:
    """A document's right answer, as text."""
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "multiple_choice" and isinstance(target, int):
        target = task.doc_to_choice(document)[target]
    return [str(one) for one in target] if isinstance(target, list) else str(target)


def answer(task, row: dict) -> dict:
    """What a method said, as text, with the choices where there are some."""
    said = row["filtered_resps"]
    if task.OUTPUT_TYPE == "multiple_choice":
        choices = task.doc_to_choice(row["doc"])
        scores = [float(score) for score, _ in said][: len(choices)]
        best = max(range(len(scores)), key=scores.__getitem__)
        return {"answer": choices[best], "choices": [list(pair) for pair in zip(choices, scores)]}
    first = said[0] if isinstance(said, list | tuple) and said else said
    return {"answer": first if isinstance(first, str) else str(first)}


def evidence(task, request) -> list[tuple[int, int]]:
    """Where the sentences of a prompt's context that have a right answer in them begin and end."""
    name, prompt = task.task_name, request.args[0]
    if not re.fullmatch(KNOWN, name):
        return []
    right = gold(task, request.doc)
    answers = right if isinstance(right, list) else [right]
    end = context(name, prompt, request.doc)
    texts = [part.strip() for one in answers for part in one.split(", ")]
    words = [re.compile(rf"(?<!\w){re.escape(one)}(?!\w)", re.IGNORECASE) for one in texts if len(one) > 1]
    spans = (found.span() for found in SENTENCE.finditer(prompt, 0, len(prompt) if end is None else end))
    kept = [(a, b) for a, b in spans if any(word.search(prompt, a, b) for word in words)]
    return kept[:SENTENCES]


def sought(tokenizer, evidence, prompts) -> dict[int, tuple]:
    """{number of a prompt: (its text, its tokens, those of each sentence of its evidence)}; prompts:
    (request, all tokens of its prompt, how many were cut off). evidence(request): where the sentences are."""
    found = {}
    for index, (request, ids, gone) in enumerate(prompts):
        if some := numbers(tokenizer, request.args[0], ids, gone, evidence(request)):
            found[index] = request.args[0], ids[gone:], some
    return found


def told(tokenizer, wanted: dict[int, tuple], held: dict[int, list[float]]) -> dict[str, list[dict]]:
    """{prompt: its `evidence`}, of what `sought` found and the shares that were held of it."""
    found = {}
    for index, (text, ids, sentences) in wanted.items():
        if known := held.get(index):
            shares, said = iter(known), lambda one, ids=ids: tokenizer.decode([ids[one]])
            found[text] = [
                {"tokens": [*map(said, some)], "held": [*islice(shares, len(some))]} for some in sentences
            ]
    return found


def numbers(tokenizer, text: str, ids: list[int], gone: int, spans: list[tuple[int, int]]) -> list[list[int]]:
    """The tokens of some pieces of a prompt, by number among those that are left of it: the first `gone` of
    `ids` have been cut off. None where the tokenizer does not say where its tokens end."""
    ends = ends_of(tokenizer, text, ids) if spans else None
    if ends is None:
        return []
    starts = [0, *ends[:-1]]
    inside = lambda a, b: [i - gone for i in range(gone, len(ids)) if ends[i] > a and starts[i] < b]
    return [found for a, b in spans if (found := inside(a, b))]
