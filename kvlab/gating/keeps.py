"""Keeps: the loss from tokens that a cache drops. Fluent text hides it, so questions are asked.

Documents of facts (recall) and facts in prose (needle), under both protocols: *context-first*, where a
context is compressed before the question is known, and *question-inside*, where the compressed prompt
contains the question. The answer is the name whose first token is the most probable of four, all in the
document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..ask import opened, plain
from ..devices import entry_of
from .formats import SURE
from .reading import Reading
from .texts import CHOICES, NAMES, Document, document

PROTOCOLS = ("context-first", "question-inside")
QUESTIONS = {"context-first": 3, "question-inside": 1}  # of a document


@dataclass
class Answers:
    """Right and wrong answers of one method, by protocol, in the order of the questions."""

    right: dict[str, list[bool]] = field(default_factory=lambda: {name: [] for name in PROTOCOLS})

    def share(self, protocol: str) -> float:
        said = self.right[protocol]
        return sum(said) / len(said) if said else math.nan


@torch.no_grad()
def ask(model, tokenizer, methods: list, seed: int, found: dict[str, Answers]) -> dict[str, str]:
    """Ask every method, `full` included, about two documents more. Returns {method: why it was refused}."""
    refused, names = {}, told_apart(tokenizer)
    if len(names) < CHOICES:
        return dict.fromkeys(
            methods, "in this tokenizer, the names to choose among begin with the same token"
        )
    for needle in (False, True):
        asked = document(2 * seed + needle, needle, QUESTIONS["context-first"], names)
        context = torch.tensor([opened(tokenizer, asked.context)], device=entry_of(model))
        first = Reading.of(model, context)
        cut = [_joined(first.ids, tokenizer, begun) for begun, _, _ in asked.questions]
        inside = [(Reading.of(model, ids[:, :-1]), ids) for ids in cut[: QUESTIONS["question-inside"]]]
        for method in methods:
            try:
                said = _answers(model, tokenizer, method, asked, first, cut, inside)
            except (ValueError, TypeError) as error:
                refused[method] = str(error)
                continue
            answers = found.setdefault(method, Answers())
            for protocol, some in said.items():
                answers.right[protocol] += some
    return refused


def _answers(model, tokenizer, method, asked: Document, first: Reading, cut, inside) -> dict[str, list[bool]]:
    held = first.taken(method)
    held.cache.hold()
    said: dict[str, list[bool]] = {name: [] for name in PROTOCOLS}
    for ids, question in zip(cut, asked.questions, strict=True):
        logits = held.copied().feed(ids[:, first.ids.shape[1] :], last=True)
        said["context-first"].append(_right(tokenizer, logits, question))
    for (reading, ids), question in zip(inside, asked.questions, strict=False):
        logits = reading.taken(method).feed(ids[:, -1:], last=True)
        said["question-inside"].append(_right(tokenizer, logits, question))
    return said


def _right(tokenizer, logits, question: tuple[str, list[str], int]) -> bool:
    begun, names, label = question
    return int(logits[0, [_first(tokenizer, begun, name) for name in names]].argmax()) == label


def _first(tokenizer, begun: str, name: str) -> int:
    """The first token of a name that ends a sentence: alone, a name may begin with the blank before it."""
    before, whole = (plain(tokenizer, said) for said in (begun, f"{begun} {name}"))
    return whole[min(len(before), len(whole) - 1)]


def told_apart(tokenizer) -> list[str]:
    """Names of which no two begin with the same token."""
    return list({_first(tokenizer, "The cat", name): name for name in NAMES[::-1]}.values())[::-1]


def _joined(context: torch.Tensor, tokenizer, question: str) -> torch.Tensor:
    """Ids of a context and a question, in which no token is of both."""
    return torch.cat([context, context.new_tensor([plain(tokenizer, question)])], 1)


def difference(mine: list[bool], full: list[bool]) -> tuple[float, float]:
    """95 % interval of a method's share of right answers less that of the full cache, on the same questions
    (Agresti and Min 2005: half an answer is added to either kind of disagreement)."""
    lost = sum(b and not a for a, b in zip(mine, full, strict=True)) + 0.5
    won = sum(a and not b for a, b in zip(mine, full, strict=True)) + 0.5
    count = len(mine) + 2
    mean = (won - lost) / count
    error = math.sqrt(won + lost - (won - lost) ** 2 / count) / count
    return mean - SURE * error, mean + SURE * error


def beats_guessing(right: list[bool]) -> bool:
    """Whether so many right answers are more than chance gives, one-sided, at 5 %."""
    chance, count = 1 / CHOICES, len(right)
    wanted = sum(right)
    tail = sum(
        math.comb(count, k) * chance**k * (1 - chance) ** (count - k) for k in range(wanted, count + 1)
    )
    return tail < 0.05
