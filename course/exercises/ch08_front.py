# ruff: noqa: E501 (a sentence is one line)
"""Chapter 8: comparing methods, the front and the choice."""

from course.teaching.check.answer import same_members
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 2. The Pareto front, with a bug.


def _as_found(points):
    def beats(other, point):
        (a, s), (b, t) = point, other  # accuracy and bytes of each
        return (b > a or t < s) and other != point

    return [i for i, point in enumerate(points) if not any(beats(other, point) for other in points)]


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
    below = [(few / 10, less), (few / 10 + 0.1, less + 5), (few / 10 + 0.4, less + 6)]
    below += [(few / 10 + 0.3998, less + 6)]  # hardly worse is worse
    return [
        (made(2),),
        (made(5),),
        ([(few / 10, 7 - less), ((few + less) / 10, 7)],),
        ([(few / 10, less)],),
        (made(3),),
        (made(7),),
        (shuffled(draw, below),),  # the second is no corner of the hull, and on the front
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
    RIGHT["pareto"],
    _tables,
    MISTAKES["pareto"],
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
