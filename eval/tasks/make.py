"""Write the rows of `recall`, `needle` and `chain`: `python -m eval.tasks.make`.

Seeds start at `corpus.TASK_SEED`, which training never reaches.  Of every four rows two use the
wording and the names of training, one the wording `met` (evaluation only), one the names that are
never an answer in training (for a chain: every second row has such names).  The same rows serve the
multiple-choice task and its exact-match twin (`recall_em`, ...).
"""

import argparse
import json
import random
from pathlib import Path

from transformers import AutoTokenizer

from eval.tasks import corpus, words
from kvlab.models import EMBEDDED

DATA = Path(__file__).resolve().parent / "data"
CHECKPOINT = EMBEDDED["workshop"]
ROWS = {"recall": 96, "needle": 48, "chain": 60}  # whole turns of the kinds below; the time decides
RECALL_FACTS = (14, 18, 22)  # facts of a document, in turn
NEEDLE_SENTENCES = (15, 30, 60)  # sentences of prose around four facts, in turn
CHAIN_FACTS, CHAIN_SENTENCES = 8, 6


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
        answer = document.answer.strip()
        others = [c for c in document.choices if c != answer]
        choices = sorted([answer, *rng.sample(others, min(7, len(others)))])
        made.append(
            {
                "id": f"{name}-{i:03}",
                "context": document.text,
                "choices": choices,
                "label": choices.index(answer),
                "answer": answer,
                **about,
                "length": len(tokenizer(document.text)["input_ids"]),
            }
        )
    return made


def main(words: list[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m eval.tasks.make", description=__doc__).parse_args(words)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for make in (recall, needle, chain):
        made = rows(make.__name__, make, tokenizer)
        lines = "".join(json.dumps(row) + "\n" for row in made)
        (DATA / f"{make.__name__}.jsonl").write_text(lines, encoding="utf-8")
        lengths = [row["length"] for row in made]
        print(f"{make.__name__}: {len(made)} rows, {min(lengths)} to {max(lengths)} tokens")


if __name__ == "__main__":
    main()
