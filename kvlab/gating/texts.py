"""Texts: the texts on which a cache is judged: prose, code and facts, and questions about facts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product

import torch
from torch import Tensor

KINDS = ("prose", "code", "facts")
COLOURS = ("blue", "green", "white", "black", "brown", "yellow", "grey", "red")
ROOMS = ("office", "kitchen", "cellar", "library", "workshop", "garage", "studio", "attic")
ANIMALS = ("cat", "dog", "horse", "cow", "fox", "goat", "duck", "mouse")
NAMES = (
    "Martin", "Alice", "Peter", "Laura", "Simon", "Helen", "Oscar", "Nina", "Victor", "Julia", "Frank",
    "Clara", "Hugo", "Emma", "Paul", "Diana", "Ruth", "Walter", "Irene", "George", "Sarah", "Thomas",
    "Linda", "Robert", "Anna", "David", "Maria", "Kevin", "Susan", "Daniel",
)  # fmt: skip
CHOICES = 4  # answers to choose among
FACTS = 12  # of a document without prose: small models answer, too


@dataclass(frozen=True)
class Document:
    """A context and questions about it: (how a sentence begins, the names to choose among, the right one)."""

    context: str
    questions: list[tuple[str, list[str], int]]


def text(kind: str) -> str:
    """A text of one of `KINDS`, of the length in the package. The code is a copy of two files of kvlab, of
    2026-11-27: a verdict must not change when a comment does."""
    if kind in ("prose", "code"):
        return (files("kvlab") / "gating" / f"{kind}.txt").read_text(encoding="utf-8")
    return keys(64)


def rows(tokenizer, tokens: int, count: int, own: str | None = None) -> Tensor:
    """Token ids `[rows, tokens]`: `count` pieces of every kind, or of the reader's `own` text as many in all,
    each behind the token that begins a text, where the tokenizer sets one. ValueError for a text that is too
    short, or of unknown words."""
    begin = [one for one in tokenizer("a").input_ids[:1] if one == tokenizer.bos_token_id]
    size, found = tokens - len(begin), []
    wanted = count if own is None else count * len(KINDS)
    for said in map(text, KINDS) if own is None else [own]:
        ids = tokenizer(said, add_special_tokens=False, verbose=False).input_ids
        if len(ids) < wanted * size:
            raise ValueError(f"text: {len(ids)} tokens, expected at least {wanted * size}")
        if 2 * ids.count(getattr(tokenizer, "unk_token_id", None)) > len(ids):
            raise ValueError("text: most of its words are unknown to this tokenizer; give another text")
        found += [begin + ids[at : at + size] for at in range(0, wanted * size, size)]
    return torch.tensor(found, device="cpu")


def document(seed: int, needle: bool, questions: int, names: Sequence[str] = NAMES) -> Document:
    """Facts alone, or a few of them in prose. The names to choose among, at least `CHOICES`, are all in the
    document."""
    rng = random.Random(seed)
    pairs = _pairs(rng, CHOICES if needle else FACTS, names, ANIMALS)
    said = [f"The {animal} {name} sleeps in the {rng.choice(ROOMS)}." for animal, name in pairs]
    if needle:
        paragraphs = [part for part in text("prose").split("\n\n") if part.strip()]
        sentences = rng.choice(paragraphs).replace("\n", " ").split(". ")
        sentences = [f"{one.rstrip('.')}." for one in sentences]
        for fact in said:
            sentences.insert(rng.randrange(len(sentences)), fact)
        said = sentences
    asked = []
    for animal, name in rng.sample(pairs, questions):
        others = rng.sample([*dict.fromkeys(other for _, other in pairs if other != name)], CHOICES - 1)
        choices = sorted([name, *others])
        asked.append((f"\nQuestion: the {animal}", choices, choices.index(name)))
    return Document(" ".join(said), asked)


def keys(count: int) -> str:
    """So many facts of one kind."""
    places = _pairs(random.Random(0), count, NAMES, ROOMS)
    return " ".join(f"The key of the {place} is with {name}." for place, name in places)


def _pairs(rng: random.Random, count: int, names: Sequence[str], nouns: Sequence[str]) -> list[tuple]:
    """(Thing, name): no thing comes twice, and no name before all have come."""
    things = rng.sample([" ".join(pair) for pair in product(COLOURS, nouns)], count)
    some = [name for _ in range(-(-count // len(names))) for name in rng.sample(names, len(names))]
    return list(zip(things, some, strict=False))
