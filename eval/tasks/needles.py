"""Needles of RULER's shapes (Hsieh et al. 2024, arXiv 2404.06654) in text of our own.

A document is prose with facts between its sentences, filled up to any length in tokens of any tokenizer; the
question comes last.
A task's settings (`--metadata '{"lengths": [1024, 4096], "documents": 100}'`) says how long and how many.
"""

import random
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import datasets
from transformers import AutoTokenizer

ROOM = f"{Path(__file__).resolve().parents[1].name}.tasks"  # lm-eval loads this file by its path
corpus, NAMES = import_module(f"{ROOM}.corpus"), import_module(f"{ROOM}.words").NAMES
SEED = 4_000_000  # apart from the seeds of training and of the other tasks
VALUES, QUERIES, DISTRACTORS, HOPS = 4, 4, 7, 4
MARGIN = 40  # tokens of a length that are left for question and answer


def code(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def single(rng: random.Random):
    """One fact."""
    (key,), answer = corpus.keys(rng, 1, corpus.ANIMALS), code(rng)
    return [f"The code of the {key} is {answer}."], f"What is the code of the {key}?", [answer]


def multikey(rng: random.Random):
    """One fact among others of its kind."""
    keys = corpus.keys(rng, 1 + DISTRACTORS, corpus.ANIMALS)
    answers = [code(rng) for _ in keys]
    facts = [f"The code of the {key} is {answer}." for key, answer in zip(keys, answers)]
    return facts, f"What is the code of the {keys[0]}?", answers[:1]


def multivalue(rng: random.Random):
    """Several facts about one thing, all of which are asked for."""
    (key,), answers = corpus.keys(rng, 1, corpus.ANIMALS), [code(rng) for _ in range(VALUES)]
    return [f"A code of the {key} is {a}." for a in answers], f"What are all codes of the {key}?", answers


def multiquery(rng: random.Random):
    """Several things, all of which are asked about."""
    keys = corpus.keys(rng, QUERIES, corpus.ANIMALS)
    answers = [code(rng) for _ in keys]
    facts = [f"The code of the {key} is {answer}." for key, answer in zip(keys, answers)]
    asked = ", ".join(f"the {key}" for key in keys)
    return facts, f"What are the codes of {asked}?", answers


def tracking(rng: random.Random):
    """A number handed from one person to the next; who has it? Another chain is mixed in."""
    names = rng.sample(NAMES, 2 * HOPS)
    facts, chains = [], (names[:HOPS], names[HOPS:])
    numbers = code(rng), code(rng)
    for chain, number in zip(chains, numbers):
        facts.append(f"{chain[0]} wrote down {number}.")
        facts += [f"{later} copied it from {earlier}." for earlier, later in pairwise(chain)]
    order = sorted(range(2 * HOPS), key=lambda i: (i % HOPS, rng.random()))  # a copy after its original
    return [facts[i] for i in order], f"Which names have the number {numbers[0]}?", chains[0]


def two_hops(rng: random.Random):
    """Whose is it, and what is the code of that person?"""
    keys, owners = corpus.keys(rng, HOPS, corpus.ANIMALS), rng.sample(NAMES, HOPS)
    answers = [code(rng) for _ in owners]
    facts = [f"The {key} belongs to {owner}." for key, owner in zip(keys, owners)]
    facts += [f"The code of {owner} is {answer}." for owner, answer in zip(owners, answers)]
    rng.shuffle(facts)
    return facts, f"What is the code of the owner of the {keys[0]}?", answers[:1]


KINDS = {
    function.__name__: function for function in (single, multikey, multivalue, multiquery, tracking, two_hops)
}


def row(kind: str, number: int, length: int, tokenizer) -> dict:
    """{input, outputs, length}: a document of at most `length` tokens, question and answer included."""
    rng = random.Random(f"{SEED} {kind} {length} {number}")
    facts, question, outputs = KINDS[kind](rng)
    question = f"\nQuestion: {question}\nAnswer:"
    filler = corpus.prose(rng, length // 6)
    sizes = [len(tokenizer(f" {sentence}", add_special_tokens=False).input_ids) for sentence in filler]
    room = length - len(tokenizer(f"{' '.join(facts)}{question}").input_ids) - MARGIN
    if room < 0:
        raise ValueError(f"lengths: {length} tokens are too few for the facts of {kind}")
    count = 0
    while count < len(sizes) and room >= sizes[count]:
        room -= sizes[count]
        count += 1
    return {
        "input": corpus.scatter(rng, facts, filler[:count]) + question,
        "outputs": outputs,
        "length": length,
    }


def dataset(kind: str, tokenizer: str, lengths=(1024,), documents: int = 100, **told) -> datasets.DatasetDict:
    """The rows of one kind, `documents` for each of `lengths`. ValueError for what are no such numbers."""
    sizes = [lengths] if isinstance(lengths, int) else lengths
    if not isinstance(sizes, list | tuple) or not sizes or not all(map(_counts, sizes)):
        raise ValueError(f"lengths={lengths!r}: expected tokens of a document, as a list: [1024, 4096]")
    if not _counts(documents):
        raise ValueError(f"documents={documents!r}: expected a number of documents for each length")
    words = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    made = [row(kind, number, size, words) for size in sizes for number in range(documents)]
    return datasets.DatasetDict({"test": datasets.Dataset.from_list(made)})


def _counts(number) -> bool:
    return isinstance(number, int) and number > 0


needles_single = partial(dataset, "single")
needles_multikey = partial(dataset, "multikey")
needles_multivalue = partial(dataset, "multivalue")
needles_multiquery = partial(dataset, "multiquery")
needles_tracking = partial(dataset, "tracking")
needles_two_hops = partial(dataset, "two_hops")


def scored(document: dict, results: list[str]) -> dict[str, float]:
    """The share of what was asked for that is in the answer, as RULER counts it."""
    found = [output.lower() in results[0].lower() for output in document["outputs"]]
    return {"acc": sum(found) / len(found)}
