# ruff: noqa: E501 (a sentence is one line)
"""Chapter 8: comparing methods, the front and the choice."""

from course.teaching.check.answer import same_members
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

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


def _tables(draw):
    """Accuracy and bytes of some methods: some are equal in one of the two, and one point is there twice."""

    def made(count):
        points = [(whole(draw, 1, 9) / 10, whole(draw, 2, 20)) for _ in range(count)]
        best, small = max(points), min(points, key=lambda point: point[1])
        points += [
            (best[0], best[1]),
            (best[0], best[1] + 3),
            (small[0] - 0.05, small[1]),
        ]  # equal, or worse in one of the two
        return shuffled(draw, points)

    few, less = whole(draw, 2, 5), whole(draw, 1, 4)
    return [
        (made(2),),
        (made(5),),
        ([(few / 10, 7 - less), ((few + less) / 10, 7)],),
        ([(few / 10, less)],),
        (made(3),),
        (made(7),),
    ]


_POINTS = {
    "there is no such point: indices are 0 to the number of points - 1": lambda r, right, points: any(
        not 0 <= i < len(points) for i in r.flatten().tolist()
    ),
    "an index is there twice": lambda r, *case: len(r.unique()) < r.numel(),
    "a point is missing that no other one beats": lambda r, right, points: {*right.tolist()} - {*r.tolist()},
    "a point is left that another one beats": lambda r, right, points: {*r.tolist()} - {*right.tolist()},
}


pareto = Exercise(
    "pareto",
    _front,
    _tables,
    {
        "one that is better in one of the two and worse in the other does not beat a method": (_either),
        "one that is equal in one of the two and better in the other beats a method, too: use >= and <=": _strict,
        "the comparison of the bytes is reversed: fewer are better": _large,
        "every point beats itself, so nothing is left: equal points must not": _beats_itself,
        "the comparison of the accuracies is reversed: more is better": _inaccurate,
        "both comparisons are reversed: those are the methods that beat no other": _turned,
        "those are the points themselves: return their indices": lambda points: [
            points[i] for i in _front(points)
        ],
        "those are the methods that are beaten: return the others": lambda points: [
            i for i in range(len(points)) if i not in _front(points)
        ],
        "only the most accurate is left: smaller ones may be on the front, too": lambda points: [
            max(range(len(points)), key=lambda i: points[i])
        ],
        "only the smallest is left: larger, more accurate ones are on the front, too": lambda points: [
            min(range(len(points)), key=lambda i: points[i][1])
        ],
        "that is a mask: return the indices": lambda points: [
            i in _front(points) for i in range(len(points))
        ],
        "every index is too large by 1: indices start at 0": lambda points: [i + 1 for i in _front(points)],
        "of two equal points one is dropped: a point does not beat its equals": _first_of_equals,
        "nothing is left out: a point goes when any other one beats it": lambda points: list(
            range(len(points))
        ),
        "each point is compared with the one before it only: compare it with all others": _neighbour,
        "a point goes only when all others beat it: one is enough (`any`)": _beaten_by_all,
        "a more accurate method beats whatever its bytes: it must have no more of them": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b > a for b, t in points)
        ],
        "one that is as accurate and smaller must beat a point, too": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b > a and t <= s for b, t in points)
        ],
        "one that is as small and more accurate must beat a point, too": lambda points: [
            i for i, (a, s) in enumerate(points) if not any(b >= a and t < s for b, t in points)
        ],
    },
    "no other method is at least as good as these in both",
    alike=same_members,
    holds="indices",
    given=_as_found,
    signs=_POINTS,
    shapes=_POINTS,
)

# 3. Decide: which of two methods.

fair = Choice(
    "fair",
    "d",
    {
        "a": "9 ms and 14 ms come from two machines, and the same method could have both. Measure in one run",
        "b": "in one pass over prompt and answer nothing has been compressed yet, so every method gets 40 of 40. The 30 were decoded",
        "c": "4 of 40 more is one tenth, less than one standard error of such a difference (0.11). And 20 % of the tokens are not equal bytes, since scores, positions and scales count, too",
        "d": "the difference is 0.2, more than two of its standard errors (0.08). It was decoded, at equal bytes as allocated, in one run. Next, ask forty questions on texts of your own",
    },
)
