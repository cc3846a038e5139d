"""Write the rows of `recall`, `needle`, `chain` and `recall_many`: `python -m eval.tasks.make`.

Seeds start at `corpus.TASK_SEED`, which training never reaches.  Of every four rows two use the
wording and the names of training, one the wording `met` (evaluation only), one the names that are
never an answer in training (for a chain: every second row has such names).  The same rows serve the
multiple-choice task and its exact-match twin (`recall_em`, ...).  `recall_many` asks several questions on
each document.
"""

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from kvlab.models import EMBEDDED

from . import corpus, words

DATA = Path(__file__).resolve().parent / "data"
CHECKPOINT = EMBEDDED["workshop"]
ROWS = {"recall": 96, "needle": 48, "chain": 60}  # whole turns of the kinds below; the time decides
RECALL_FACTS = (14, 18, 22)  # facts of a document, in turn
NEEDLE_SENTENCES = (15, 30, 60)  # sentences of prose around four facts, in turn
CHAIN_FACTS, CHAIN_SENTENCES = 8, 6
DOCUMENTS, QUESTIONS = 24, 4  # of recall_many


def recall(rng: random.Random, i: int) -> tuple[corpus.Document, dict]:
    style = {"wording": "met"} if i % 4 == 2 else {"names": words.EVAL_NAMES} if i % 4 == 3 else {}
    facts = RECALL_FACTS[i // 4 % 3]
    return corpus.recall(rng, facts, **style), {"facts": facts} | kind(style)


def needle(rng: random.Random, i: int) -> tuple[corpus.Document, dict]:
    style = {"wording": "met"} if i % 4 == 2 else {"names": words.EVAL_NAMES} if i % 4 == 3 else {}
    return corpus.needle(rng, NEEDLE_SENTENCES[i // 4 % 3], 4, **style), {"facts": 4} | kind(style)


def chain(rng: random.Random, i: int) -> tuple[corpus.Document, dict]:
    style = {"names": words.EVAL_NAMES} if i % 2 else {}
    filler = corpus.prose(rng, CHAIN_SENTENCES)
    return corpus.chain(rng, CHAIN_FACTS, filler=filler, **style), {"facts": CHAIN_FACTS} | kind(style)


def kind(style: dict) -> dict:
    return {
        "wording": "new" if "wording" in style else "seen",
        "names": "new" if "names" in style else "seen",
    }


def rows(name: str, make, tokenizer) -> list[dict]:
    """Rows {id, context, choices, label, answer, facts, wording, names, length in tokens}."""
    made = []
    for i in range(ROWS[name]):
        rng = random.Random(f"{corpus.TASK_SEED} {name} {i}")
        document, about = make(rng, i)
        asked = document.text, document.answer, document.choices
        made.append(row(rng, f"{name}-{i:03}", *asked, about, tokenizer))
    return made


def row(rng: random.Random, name: str, text: str, answer: str, choices, about: dict, tokenizer) -> dict:
    """One row: the answer among seven others."""
    answer = answer.strip()
    others = [c for c in choices if c != answer]
    offered = sorted([answer, *rng.sample(others, min(7, len(others)))])
    return {
        "id": name,
        "context": text,
        "choices": offered,
        "label": offered.index(answer),
        "answer": answer,
        **about,
        "length": len(tokenizer(text)["input_ids"]),
    }


def many(tokenizer) -> list[dict]:
    """`QUESTIONS` rows on each of `DOCUMENTS` documents of facts, one after the other."""
    made = []
    for i in range(DOCUMENTS):
        rng = random.Random(f"{corpus.TASK_SEED} recall_many {i}")
        facts = RECALL_FACTS[i % 3]
        document = corpus.recall(rng, facts, questions=QUESTIONS)
        for j, (question, answer) in enumerate(document.questions):
            about = {"facts": facts} | kind({})
            text = document.context + question
            name = f"recall_many-{i:03}-{j}"
            made.append(row(rng, name, text, answer, document.choices, about, tokenizer))
    return made


def main(words: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m eval.tasks.make", description=__doc__).parse_args(words)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    made = {make.__name__: rows(make.__name__, make, tokenizer) for make in (recall, needle, chain)}
    for name, found in (made | {"recall_many": many(tokenizer)}).items():
        lines = "".join(json.dumps(one) + "\n" for one in found)
        (DATA / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        lengths = [one["length"] for one in found]
        print(f"{name}: {len(found)} rows, {min(lengths)} to {max(lengths)} tokens")


if __name__ == "__main__":
    main()
