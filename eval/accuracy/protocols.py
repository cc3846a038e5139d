"""Protocols: which part of a prompt is compressed, and which questions follow.

`question-inside` compresses the whole prompt, so a method may look at the question when it chooses. Under the
others the context alone is compressed (`boundaries.py` says where it ends), a fraction of budget is of the
context, and question and answer follow at their true positions, held on top: they evict nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence

INSIDE, FIRST, MANY, REUSE = "question-inside", "context-first", "many-questions", "reuse"
PROTOCOLS = {
    FIRST: "the context alone is prefilled and compressed; the question follows at its true positions in "
    "one pass, which reads a cache on the host whole; its last token and the answer go through the cache one "
    "by one",
    INSIDE: "a prompt and its question are prefilled and compressed together, so a method may look at the "
    "question when it chooses",
    MANY: "one context is compressed once, and every question on it is asked of a fork: accuracy per "
    "question, cost per context",
    REUSE: "the context is compressed with another question on it inside; what stays of the context is then "
    "asked this question (what a format or a fetch learns of that other question is not carried over)",
}
ONCE, EVERY_STEP = "once", "every-step"
EVICT = {  # what a keep does with what comes after the prompt
    ONCE: "what comes after the compression is held on top of the budget and evicts nothing of the context",
    EVERY_STEP: "a method that evicts at every step by definition does so, within its budget",
}


def checked(name: str, value: str | None, known: dict[str, str]) -> str:
    """A protocol's or an eviction's name. Raises ValueError for another."""
    if value not in known:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(known)}")
    return value


def eviction(protocol: str, evict: str | None) -> str:
    """What keeps do after the prompt: as named, or by default as in the protocol. ValueError for another
    name, and where it cannot be."""
    if evict is None:
        return EVERY_STEP if protocol == INSIDE else ONCE
    checked("evict", evict, EVICT)
    if protocol == REUSE and evict == EVERY_STEP:
        raise ValueError(
            f"evict={evict!r}: under protocol {REUSE} what stays of the context is asked again, and none "
            "of it goes; expected once"
        )
    return evict


def families(prompts: Sequence[Sequence[int]], cuts: list[int] | None, protocol: str) -> list[list[int]]:
    """Prompts, by number, that one prefill serves: under `many-questions` and `reuse` all of one context."""
    if cuts is None or protocol not in (MANY, REUSE):
        return [[index] for index in range(len(prompts))]
    found: dict[tuple, list[int]] = {}
    for index, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
        found.setdefault(tuple(prompt[:cut]), []).append(index)
    alone = [members for members in found.values() if len(members) == 1]
    if protocol == REUSE and alone:
        raise ValueError(
            f"protocol {REUSE}: {len(alone)} of {len(found)} contexts have one question only, and none to be "
            "compressed with"
        )
    if len(alone) == len(found):
        raise ValueError(f"protocol {protocol}: no two prompts share their context")
    return list(found.values())
