"""Significance between any two methods of a task: McNemar's exact test of every pair, corrected by Holm.

With many methods a few pairs differ by chance. Holm's correction (1979) multiplies the smallest p by the
number of pairs, the next one by one less, and so on. The probability that any mark of a matrix is chance is
then below 5 %.
"""

from __future__ import annotations

from itertools import combinations

from .statistics import UNLIKELY, mcnemar
from .tables import Board

ABOUT = (
    "right of the diagonal: questions that only the column's method answers (−), and only the row's (+); "
    "left of it: p of McNemar's exact test, corrected by Holm over all pairs; * p < 0.05"
)


def holm(found: list[float]) -> list[float]:
    """Each p, corrected for how many there are."""
    corrected, most = [0.0] * len(found), 0.0
    for rank, place in enumerate(sorted(range(len(found)), key=found.__getitem__)):
        most = max(most, min(1.0, (len(found) - rank) * found[place]))
        corrected[place] = most
    return corrected


def pairs(values: dict[str, list]) -> dict[tuple[str, str], tuple[int, int, float]]:
    """{(a, b): (questions that only b answers, that only a answers, corrected p)} of {method: its outcomes};
    pairs whose outcomes are not right or wrong, or not of the same questions, are left out."""
    tested = {(a, b): mcnemar(values[a], values[b]) for a, b in combinations(values, 2)}
    tested = {pair: one for pair, one in tested.items() if one is not None}
    corrected = holm([p for *_, p in tested.values()])
    return {pair: (lost, won, p) for (pair, (lost, won, _)), p in zip(tested.items(), corrected, strict=True)}


def matrix(board: Board, task: str) -> tuple[list[str], list[list[str]]] | None:
    """(head, lines) of a task's matrix, which `ABOUT` explains; None where no two methods are compared."""
    metric = board.metric[task]["metric"]
    cells = {c["method"]: c for c in board.cells if c["task"] == task and not c.get("other_code")}
    methods = [m for m in board.methods if m in cells]
    tested = pairs({m: cells[m]["values"][metric] for m in methods})
    if not tested or task in board.at_chance:
        return None
    texts = {}
    for (a, b), (lost, won, p) in tested.items():
        star = "*" if p < UNLIKELY else ""
        texts[a, b], texts[b, a] = f"−{lost} +{won}{star}", f"{p:.2g}{star}"
    body = [
        [f"{place} {a}", *("" if a == b else texts.get((a, b), "–") for b in methods)]
        for place, a in enumerate(methods, 1)
    ]
    return ["method", *map(str, range(1, len(methods) + 1))], body
