"""Chapter 8: comparing methods."""

import torch

from course.teaching.check.answer import same_members, same_order
from course.teaching.check.exercise import Choice, Exercise

# 1. A Keep of one's own: the keys with the smallest norm stay.


def _norm_score(keys):
    return -keys.norm(dim=-1)


def _key_cases():
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randn(shape, generator=generator),) for shape in ((1, 2, 6, 4), (2, 3, 5, 8), (1, 3, 40, 16))
    ]


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
        "a sum of the channels is no norm, and large scores stay": lambda keys: keys.sum(-1),
        "that is one number for each slot of all rows: the norm is taken over dimension 3, not 0": (
            lambda keys: -keys.norm(dim=0)
        ),
        "you took the norm over the heads (dimension 1); every head keeps slots of its own": (
            lambda keys: -keys.norm(dim=1)
        ),
        "that is one number for all keys; every slot needs its own": lambda keys: -keys.norm(),
        "the channel dimension is still there: asked for is one number for each slot (no keepdim)": (
            lambda keys: -keys.norm(dim=-1, keepdim=True)
        ),
        "the sum of the magnitudes is another norm: asked for is the root of the sum of squares": (
            lambda keys: -keys.abs().sum(-1)
        ),
        "the largest channel is another norm: asked for is the root of the sum of squares": (
            lambda keys: -keys.abs().amax(-1)
        ),
        "those are the slots in order of their norm; asked for is a score for each slot": (
            lambda keys: keys.norm(dim=-1).argsort(-1)
        ),
        "those are the slots in order, largest first; asked for is a score for each slot": (
            lambda keys: (-keys.norm(dim=-1)).argsort(-1)
        ),
        "that is the one slot with the smallest norm; asked for is a score for each": (
            lambda keys: keys.norm(dim=-1).argmin(-1)
        ),
        "the scores are sorted: they no longer belong to their slots": (
            lambda keys: (-keys.norm(dim=-1)).sort(-1).values
        ),
        "all scores are the same: no slot comes before another": (lambda keys: torch.ones(keys.shape[:3])),
        "the mean of the channels is no norm: positive and negative ones cancel": lambda keys: keys.mean(2),
    },
    "one score for each slot, the highest for the smallest key",
    alike=same_order,
    signs={
        "that is a mask; asked for is a score for each slot, by which the slots can be ordered": (
            lambda r, keys: r.shape == keys.shape[:3] and set(r.unique().tolist()) <= {0, 1}
        ),
        "slots with different norms get the same score: do not round or cut off": (
            lambda r, keys: r.shape == keys.shape[:3] and len(r.unique()) < r.numel()
        ),
    },
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


def _as_found(points):
    def beats(other, point):
        (a, s), (b, t) = point, other  # accuracy and bytes of each
        return (b > a or t < s) and other != point

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


def _left(points, beats):
    """The indices of the points that no other beats; beats(b, t, a, s): accuracy and bytes of each."""
    return [
        i
        for i, (a, s) in enumerate(points)
        if not any(beats(b, t, a, s) for b, t in points if (b, t) != (a, s))
    ]


def _inaccurate(points):
    return _left(points, lambda b, t, a, s: b <= a and t <= s)


def _turned(points):
    return _left(points, lambda b, t, a, s: b <= a and t >= s)


def _first_of_equals(points):
    return [i for i in _front(points) if points[i] not in points[:i]]


def _neighbour(points):
    return [i for i in range(len(points)) if i == 0 or 0 in _front([points[i], points[i - 1]])]


def _beaten_by_all(points):
    def beaten(a, s):
        others = [(b, t) for b, t in points if (b, t) != (a, s)]
        return bool(others) and all(b >= a and t <= s for b, t in others)

    return [i for i, (a, s) in enumerate(points) if not beaten(a, s)]


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
        ([(0.5, 3), (0.7, 5), (0.5, 3)],),
        ([(0.4, 9), (0.6, 2), (0.5, 3)],),
    ],
    {
        "being better in one of the two is not enough to beat a method: it must not be worse in the other": (
            _either
        ),
        "at least as accurate with at most as many bytes is enough to beat: compare with >= and <=": _strict,
        "fewer bytes are better: the comparison of the sizes is turned around": _large,
        "nothing is left: does every point beat itself here? Leave out equal points": _beats_itself,
        "less accurate is better here: the comparison of the accuracies is turned around": _inaccurate,
        "both comparisons are turned around: those are the methods that beat no other": _turned,
        "those are the points themselves; asked for are their indices": lambda points: [
            points[i] for i in _front(points)
        ],
        "those are the methods that are beaten; asked for are the others": lambda points: [
            i for i in range(len(points)) if i not in _front(points)
        ],
        "only the most accurate is left: the smaller ones may be on the front, too": lambda points: [
            max(range(len(points)), key=lambda i: points[i])
        ],
        "only the smallest is left: larger, more accurate ones are on the front, too": lambda points: [
            min(range(len(points)), key=lambda i: points[i][1])
        ],
        "that is a mask; asked for are the indices": lambda points: [
            i in _front(points) for i in range(len(points))
        ],
        "indices start at 0": lambda points: [i + 1 for i in _front(points)],
        "of two equal points one is dropped: a point does not beat its equals": _first_of_equals,
        "nothing is left out: compare with all other points": lambda points: list(range(len(points))),
        "each point is compared with its neighbour alone; compare it with all others": _neighbour,
        "`all` asks that every other method beats this one; one is enough (`any`)": _beaten_by_all,
        "more accurate alone beats here: it must have no more bytes, too": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b > a for b, t in points)
        ],
        "it must be better in accuracy to beat here: as good and smaller is enough": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b > a and t <= s for b, t in points)
        ],
        "it must be smaller to beat here: as small and more accurate is enough": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b >= a and t < s for b, t in points)
        ],
    },
    "what is left is not beaten in both",
    alike=same_members,
    holds="indices",
    given=_as_found,
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
