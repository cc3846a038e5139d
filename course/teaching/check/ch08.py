"""Chapter 8: comparing methods."""

import torch

from .exercise import Choice, Exercise

# 1. A Keep of one's own: the keys with the smallest norm stay.


def _norm_score(keys):
    return -keys.norm(dim=-1)


def _key_cases():
    generator = torch.Generator().manual_seed(8)
    return [(torch.randn(shape, generator=generator),) for shape in ((1, 2, 6, 4), (2, 3, 5, 8))]


norm_score = Exercise(
    "norm_score",
    _norm_score,
    _key_cases,
    {
        "this keeps the keys with the largest norm: high scores stay, so the sign must turn": (
            lambda keys: keys.norm(dim=-1)
        ),
        "that is one number for each channel; the norm is taken over the channels (dimension 3)": (
            lambda keys: -keys.norm(dim=2)
        ),
        "that is one number for each head; every slot needs its own": lambda keys: -keys.norm(dim=(2, 3)),
        "a sum of the channels is no norm: positive and negative ones cancel": lambda keys: -keys.sum(-1),
    },
    "one score for each slot, the highest for the smallest key",
)


# 2. The Pareto front, with a bug.


def _front(points):
    def beaten(a, s):
        return any(b >= a and t <= s and (b, t) != (a, s) for b, t in points)

    return [i for i, (a, s) in enumerate(points) if not beaten(a, s)]


def _either(points):
    return [
        i
        for i, (a, s) in enumerate(points)
        if not any((b > a or t < s) and (b, t) != (a, s) for b, t in points)
    ]


def _strict(points):
    return [i for i, (a, s) in enumerate(points) if not any(b > a and t < s for b, t in points)]


def _large(points):
    return [
        i
        for i, (a, s) in enumerate(points)
        if not any(b >= a and t >= s and (b, t) != (a, s) for b, t in points)
    ]


def _beats_itself(points):
    return [i for i, (a, s) in enumerate(points) if not any(b >= a and t <= s for b, t in points)]


pareto = Exercise(
    "pareto",
    _front,
    lambda: [
        ([(0.9, 100), (0.9, 50), (0.5, 20), (0.4, 30)],),
        ([(1.0, 10), (0.8, 12), (0.7, 5), (0.7, 4), (0.2, 4)],),
        ([(0.6, 7), (0.9, 9)],),
        ([(0.5, 3)],),
    ],
    {
        "being better in one of the two is not enough to beat a method: it must not be worse in the other": (
            _either
        ),
        "a method that is as accurate with fewer bytes does beat another: compare with >= and <=": _strict,
        "fewer bytes are better: the comparison of the sizes is turned around": _large,
        "every point beats itself here, so nothing is left: leave out equal points": _beats_itself,
    },
    "what is left is not beaten in both",
)

# 3. Design: a fair comparison.

fair = Choice(
    "fair",
    "d",
    {
        "a": "milliseconds of two machines do not compare; measure both in one run on one machine",
        "b": "the scores of the prompt's own pass never meet the compressed cache: all methods look perfect",
        "c": "equal budgets in tokens are not equal bytes: scores, positions and scales count too",
        "d": "the same questions, answered by decoding, at equal bytes as allocated, in one run",
    },
)
