"""Guess: whether InfiniGen's rehearsal finds the tokens that this model attends to, from one prompt."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..calibrate.skew import skew
from ..measure import studies
from .texts import keys

ENOUGH = 0.95  # of the best tokens that all columns bring: four models then answer as `full` does
LADDER = tuple((alpha, ratio) for ratio in (0.3, 0.5, 1.0) for alpha in (4.0, 5.0, float("inf")))


def foreseen(model, tokenizer, spec) -> str:
    """How often the settings of a method that guesses bring the token that a head attends to most, over all
    layers and in the worst one, and the first of `LADDER` that bring it nearly as often (`ENOUGH`) as a guess
    from all columns; nothing for a method that does not guess."""
    asked = getattr(spec.policies().get("place"), "fetch", None)
    if not getattr(asked, "speculates", False):
        return ""
    ids = torch.tensor([tokenizer(keys(20)).input_ids], device="cpu")
    try:
        passage = studies.read(model, ids)
        guessed = [i for i, guess in enumerate(passage.guesses) if guess is not None and not asked.whole(i)]
        matrices = skew(model)
    except ValueError:  # which refuses the method as well, in a line of its own
        return ""
    if not guessed:
        return ""

    def brings(fetch) -> dict[int, float]:
        return {i: studies.brings_best(passage, i, fetch, matrices[i]) for i in guessed}

    def told(found: dict[int, float]) -> str:
        worst = min(found, key=found.get)
        mean = sum(found.values()) / len(found)
        return f"{100 * mean:.0f} % (layer {worst}: {100 * found[worst]:.0f} %)"

    said = f"its guess brings {told(brings(asked))} of the best tokens"
    enough = ENOUGH * sum(brings(replace(asked, alpha=float("inf"), ratio=1.0)).values())
    for alpha, ratio in LADDER:
        found = brings(replace(asked, alpha=alpha, ratio=ratio))
        if sum(found.values()) >= enough:
            break
    return f"{said}, alpha={alpha:g},ratio={ratio:g} {told(found)}"
