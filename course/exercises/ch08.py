# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 8: comparing methods."""

import torch

from course.teaching.check.answer import plain, same_members, same_shape
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

# 1. A Keep of one's own: small keys stay with their neighbours, and what must stay by rule.


def _apart(positions):
    """How far the tokens of two slots stand from each other in the text."""
    return (positions[..., :, None] - positions[..., None, :]).abs()


def _scored(
    norm=lambda keys: -keys.norm(dim=-1),
    apart=_apart,
    near=lambda apart, reach: apart <= reach,
    there=lambda positions: positions >= 0,
    among=lambda scores: scores.amax(-1),
    newest=lambda positions: positions.amax(-1, keepdim=True),
    window=lambda positions, last, recent: positions > last - recent,
    first=lambda positions, sinks: positions < sinks,
    above=torch.inf,
    empty=lambda positions: positions < 0,
    below=-torch.inf,
    give=lambda score: score,
):
    """The score with one part exchanged."""

    def norm_score(keys, positions, sinks, recent, reach):
        score = norm(keys)
        beside = near(apart(positions), reach) & there(positions)[..., None, :]
        score = among(score[..., None, :].expand(beside.shape).masked_fill(~beside, -torch.inf))
        score = score.masked_fill(window(positions, newest(positions), recent), above)
        score = score.masked_fill(first(positions, sinks), above)
        return give(score.masked_fill(empty(positions), below))

    return norm_score


_norm_score = _scored()


def _mean(scores):
    """Over what is no infinity."""
    there = scores > -torch.inf
    return scores.masked_fill(~there, 0).sum(-1) / there.sum(-1).clamp(min=1)


def _same_ranking(one, other):
    """The same slots above and below all others, and the same order among the rest, whatever the scores are."""
    one, other = plain(one), plain(other)
    if not same_shape(one, other) or one.dim() != 3 or one.isnan().any():
        return False
    one, rest = one.double(), other.isfinite()
    above, should = (x[..., :, None] > x[..., None, :] for x in (one, other))
    both = rest[..., :, None] & rest[..., None, :]
    size = (
        one.where(rest, 0).abs().amax(-1)[..., None, None]
    )  # neighbours may share a score: rounding decides nothing
    near = (one[..., :, None] - one[..., None, :]).abs() <= 1e-6 * size
    return bool(above[should & ~both].all()) and torch.equal((above & ~near)[both], should[both])


def _slots(draw):
    def made(batch, heads, slots, d, sinks, recent, mixed=False, empty=0, reach=0):
        keys = torch.randn(batch, heads, slots, d, generator=draw)
        positions = torch.arange(slots).expand(batch, heads, -1).clone()
        if empty:  # the last row is shorter: small keys, and no tokens
            positions[-1] = torch.cat([torch.full((empty,), -1), torch.arange(slots - empty)])
            keys[-1, :, :empty] = 0.01
        if mixed:  # every head has lost other tokens, and its slots are in any order
            for row in positions.flatten(0, 1):
                held = torch.randperm(row.max() * 4 // 3 + 1, generator=draw)[: int((row >= 0).sum())]
                row[row >= 0] = held
        return keys, positions, sinks, recent, reach

    return [
        made(1, 2, 6, 4, 0, 1),
        made(2, 3, 7, 8, 0, 3),
        made(1, 2, 9, 4, 2, 2),
        made(2, 2, 12, 8, 3, 4, mixed=True),
        made(2, 2, 10, 8, 2, 3, empty=3),
        made(1, 2, 14, 8, 1, 2, reach=1),
        made(2, 2, 18, 6, 0, 3, mixed=True, empty=2, reach=2),
    ]


def _ends(score, wanted, where):
    """Whether the slots at `where` come before all others that do not stay by rule, in every row and head."""
    rows = zip(score.flatten(0, 1), wanted.flatten(0, 1), where.flatten(0, 1))
    return all(not at.any() or row[at].min() > row[right < torch.inf].max() for row, right, at in rows)


def _discordant(score, wanted, equal):
    """Whether two slots that do not stay by rule have scores in the wrong order, or equal ones."""
    rest = wanted.isfinite()
    pairs = (wanted[..., :, None] > wanted[..., None, :]) & rest[..., :, None] & rest[..., None, :]
    one, other = (
        score[..., :, None].expand(pairs.shape)[pairs],
        score[..., None, :].expand(pairs.shape)[pairs],
    )
    return bool((one == other).any() if equal else (one < other).any())


norm_score = Exercise(
    "norm_score",
    _norm_score,
    _slots,
    {
        "the largest keys come first: high scores stay, so the sign must be negative": _scored(
            lambda keys: keys.norm(dim=-1)
        ),
        "a sum of the channels is no norm: positive and negative values cancel": _scored(
            lambda keys: -keys.sum(-1)
        ),
        "a sum of the channels is no norm, and large scores stay": _scored(lambda keys: keys.sum(-1)),
        "the sum of the magnitudes is another norm: take the root of the sum of squares": _scored(
            lambda keys: -keys.abs().sum(-1)
        ),
        "the largest channel is another norm: take the root of the sum of squares": _scored(
            lambda keys: -keys.abs().amax(-1)
        ),
        "you take the norm over the heads, too: every head has its own": _scored(
            lambda keys: -keys.norm(dim=(1, 3), keepdim=False)[:, None].expand(keys.shape[:3])
        ),
        "those are the slots in the order of their norms: return a score for each slot": _scored(
            lambda keys: keys.norm(dim=-1).argsort(-1).float()
        ),
        "the norm is not used: all slots get the same score": _scored(
            lambda keys: torch.zeros(keys.shape[:3])
        ),
        "the newest tokens may go: they must come before all others": _scored(
            window=lambda positions, last, recent: torch.zeros_like(positions).bool()
        ),
        "only the newest token is safe: the `recent` newest must be": _scored(
            window=lambda positions, last, recent: positions == last
        ),
        "one token too many is safe: with `recent` = 1 it is the newest alone": _scored(
            window=lambda positions, last, recent: positions >= last - recent
        ),
        "the first tokens may go: positions below `sinks` must come before all others": _scored(
            first=lambda positions, sinks: torch.zeros_like(positions).bool()
        ),
        "one sink too many: positions start at 0, so compare with <, not <=": _scored(
            first=lambda positions, sinks: positions <= sinks
        ),
        "you take the last slots for the newest tokens: a slot may hold any token, so look at `positions`": _scored(
            window=lambda positions, last, recent: (
                torch.arange(positions.shape[-1]) >= positions.shape[-1] - recent
            ).expand_as(positions)
        ),
        "you take the first slots for the first tokens: a slot may hold any token, so look at `positions`": _scored(
            first=lambda positions, sinks: (torch.arange(positions.shape[-1]) < sinks).expand_as(positions)
        ),
        "an empty slot (position -1) counts as one of the first tokens: it must come after all others": _scored(
            empty=lambda positions: torch.zeros_like(positions).bool()
        ),
        "the first and the newest tokens come after all others: their infinity must be positive": _scored(
            above=-torch.inf
        ),
        "the largest position of all heads in a row counts as the newest: each head has its own": _scored(
            newest=lambda positions: positions.amax((1, 2), keepdim=True)
        ),
        "the largest position of all rows and heads counts as the newest: each head has its own": _scored(
            newest=lambda positions: positions.amax()
        ),
        "the neighbours are not used: a token scores as the best one within `reach` of it": _scored(
            near=lambda apart, reach: apart == 0
        ),
        "you take the mean of the neighbours: take the best of them": _scored(among=_mean),
        "the worst neighbour decides: the best one must": _scored(
            among=lambda scores: scores.masked_fill(scores.isinf(), torch.inf).amin(-1)
        ),
        "tokens at a distance of `reach` are left out: they count, too": _scored(
            near=lambda apart, reach: apart < reach + (reach == 0)
        ),
        "tokens at a distance of reach + 1 count: they are too far": _scored(
            near=lambda apart, reach: apart <= reach + (reach > 0)
        ),
        "you take neighbouring slots for neighbouring tokens: look at `positions`": _scored(
            apart=lambda positions: _apart(torch.arange(positions.shape[-1]).expand_as(positions))
        ),
        "only the tokens before it count as neighbours: those after it do, too": _scored(
            apart=lambda positions: (
                (positions[..., :, None] - positions[..., None, :])
                .float()
                .masked_fill(positions[..., :, None] < positions[..., None, :], torch.inf)
            )
        ),
        "an empty slot counts as a neighbour: it holds no token": _scored(
            there=lambda positions: torch.ones_like(positions).bool()
        ),
    },
    "small keys stay with their neighbours, the first and the newest always, and an empty slot never",
    alike=_same_ranking,
    grows=(
        "small keys first, and the newest token stays",
        "the newest three stay, in every row and head",
        "the first tokens stay, too",
        "heads that hold different tokens, in any order",
        "a row that is shorter, with empty slots",
        "tokens that score as their best neighbour",
        "neighbours in any order, beside empty slots",
    ),
    signs={
        "that is a mask: return a score for each slot, by which the slots can be ordered": (
            lambda r, *case: set(r.unique().tolist()) <= {0, 1}
        ),
        "an empty slot does not come after all slots with a token": lambda r, right, *case: any(
            row[wanted == -torch.inf].max() >= row[wanted > -torch.inf].min()
            for row, wanted in zip(r.flatten(0, 1), right.flatten(0, 1))
            if (wanted == -torch.inf).any()
        ),
        "the largest keys come first: high scores stay, so the sign must be negative": lambda r, right, *case: (
            _discordant(r, right, False) and not _discordant(-r, right, False)
        ),
        "a token has the score infinity and is neither one of the first nor one of the newest": (
            lambda r, right, *case: (r[right < torch.inf] == torch.inf).any()
        ),
        "a token at a position below `sinks` does not come before all others": (
            lambda r, right, keys, positions, sinks, *case: (
                not _ends(r, right, (positions < sinks) & (positions >= 0))
            )
        ),
        "one of a head's `recent` newest tokens does not come before all others": (
            lambda r, right, keys, positions, sinks, recent, reach: (
                not _ends(r, right, positions > positions.amax(-1, keepdim=True) - recent)
            )
        ),
        "slots with different norms get the same score": lambda r, right, keys, positions, sinks, recent, reach: (
            not reach and _discordant(r, right, True)
        ),
        "a key with a larger norm comes before one with a smaller norm": (
            lambda r, right, keys, positions, sinks, recent, reach: not reach and _discordant(r, right, False)
        ),
        "a token does not score as the best one within `reach` of it": (
            lambda r, right, keys, positions, sinks, recent, reach: reach
        ),
    },
    shapes={"return one score for each slot: [batch, kv_heads, slots]": lambda *case: True},
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
        "a": "9 ms and 14 ms come from two machines, and the same method could have both: measure in one run",
        "b": "in one pass over prompt and answer nothing has been compressed yet: every method gets its 40 of 40, and "
        "the 30 were decoded",
        "c": "4 of 40 more is one tenth, less than one standard error of such a difference (0.11); and 20 % of the "
        "tokens are not equal bytes, since scores, positions and scales count, too",
        "d": "the difference is 0.2, more than two of its standard errors (0.08), by decoding, at equal bytes as "
        "allocated, in one run; ask the next forty questions on texts of your own",
    },
)
