"""Statistics: is a difference from `full` more than noise? Paired by document, McNemar's test, guessing."""

from __future__ import annotations

import math

import numpy as np

SURE = 2.0  # standard errors beyond which a difference counts
UNLIKELY = 0.05  # probability below which McNemar's test calls a difference one


def paired(values: list, reference: list) -> tuple[float, float] | None:
    """(difference of the aggregate, its standard error) over the same documents, or None.

    Values are numbers (aggregate: mean) or pairs (log-likelihood, units): the difference is then that
    of log-likelihood per unit, with the standard error of a ratio.
    """
    if len(values) != len(reference) or len(values) < 2:
        return None
    if all(isinstance(v, int | float) for v in values + reference):
        gaps = np.asarray(values, float) - np.asarray(reference, float)
    elif all(isinstance(v, list | tuple) and len(v) == 2 for v in values + reference):
        units = np.asarray([v[1] for v in values], float)
        gaps = np.asarray([v[0] - r[0] for v, r in zip(values, reference, strict=True)], float)
        ratio = gaps.sum() / units.sum()
        error = np.sqrt(((gaps - ratio * units) ** 2).sum() * len(gaps) / (len(gaps) - 1))
        return float(ratio), float(error / units.sum())
    else:
        return None
    return float(gaps.mean()), float(gaps.std(ddof=1) / math.sqrt(len(gaps)))


def mcnemar(values: list, reference: list) -> tuple[int, int, float] | None:
    """(lost, won, p) of right and wrong answers to the same questions; None for values that are no such.

    lost: right in `reference` and wrong here; won: the other way round. p: how probable so uneven a split of
    the questions that differ is, either way, if a coin decided each (McNemar 1947, the exact test).
    """
    if len(values) != len(reference) or not {*map(str, values), *map(str, reference)} <= BINARY:
        return None
    lost = sum(int(r) and not int(v) for v, r in zip(values, reference, strict=True))
    won = sum(int(v) and not int(r) for v, r in zip(values, reference, strict=True))
    differ, fewer = lost + won, min(lost, won)
    tail = sum(math.comb(differ, k) for k in range(fewer + 1)) / 2**differ
    return lost, won, min(1.0, 2 * tail)


BINARY = {"0", "1", "0.0", "1.0", "True", "False"}


def differs(values: list, reference: list) -> bool:
    """Whether two lists of outcomes on the same documents differ by more than noise: by McNemar's test where
    answers are right or wrong, else by SURE standard errors of the paired difference."""
    if (test := mcnemar(values, reference)) is not None:
        return test[2] < UNLIKELY
    pair = paired(values, reference)
    return pair is not None and abs(pair[0]) > SURE * pair[1]


def beats(value: float, stderr: float | None, chance: float | None) -> bool:
    """Whether a share of right answers is above guessing by SURE standard errors; True where no guess can be
    told."""
    return chance is None or value - chance > SURE * (stderr or 0.0)
