# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 8: comparing methods."""

import torch

from course.teaching.check.answer import plain, same_members
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
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
        return False
    if one.dim() != 3 or one.isnan().any() or other.isnan().any() or one.is_complex():
        return False
    for a, b in zip(one.double().flatten(0, 1), other.double().flatten(0, 1)):
        up, down = b == torch.inf, b == -torch.inf
        rest = ~up & ~down
        ends = [a[up].min() if up.any() else torch.inf, a[down].max() if down.any() else -torch.inf]
        if rest.any() and not (ends[1] < a[rest].min() and a[rest].max() < ends[0]):
            return False
        if not ends[1] < ends[0]:
            return False
        x, y = a[rest], b[rest]  # neighbours may share a score: rounding decides nothing
        same = (x[:, None] - x[None]).abs() <= 1e-6 * x.abs().max() if len(x) else x
        if not torch.equal((x[:, None] > x[None]) & ~same, y[:, None] > y[None]):
            return False
    return True


def _slots():
    draw = torch.Generator().manual_seed(8)

    def made(batch, heads, slots, d, sinks, recent, shuffled=False, empty=0, reach=0):
        keys = torch.randn(batch, heads, slots, d, generator=draw)
        positions = torch.arange(slots).expand(batch, heads, -1).clone()
        if shuffled:
            order = torch.stack([torch.randperm(slots, generator=draw) for _ in range(batch * heads)])
            positions = (order + order // 3).view(batch, heads, slots)  # every fourth token has gone
        if empty:
            positions[-1, :, :empty], keys[-1, :, :empty] = -1, 0.01  # small keys, and none
        return keys, positions, sinks, recent, reach

    return [
        made(1, 2, 6, 4, 0, 1),
        made(2, 3, 7, 8, 0, 3),
        made(1, 2, 9, 4, 2, 2),
        made(2, 2, 12, 8, 3, 4, shuffled=True),
        made(2, 2, 10, 8, 2, 3, empty=3),
        made(1, 2, 14, 8, 1, 2, reach=1),
        made(2, 2, 18, 6, 0, 3, shuffled=True, empty=2, reach=2),
    ]


norm_score = Exercise(
    "norm_score",
    _norm_score,
    _slots,
    {
        "this keeps the keys with the largest norm: high scores stay, so the sign must turn": _scored(
            lambda keys: keys.norm(dim=-1)
        ),
        "a sum of the channels is no norm: positive and negative ones cancel": _scored(
            lambda keys: -keys.sum(-1)
        ),
        "a sum of the channels is no norm, and large scores stay": _scored(lambda keys: keys.sum(-1)),
        "the sum of the magnitudes is another norm: asked for is the root of the sum of squares": _scored(
            lambda keys: -keys.abs().sum(-1)
        ),
        "the largest channel is another norm: asked for is the root of the sum of squares": _scored(
            lambda keys: -keys.abs().amax(-1)
        ),
        "you took the norm over the heads (dimension 1); every head keeps slots of its own": _scored(
            lambda keys: -keys.norm(dim=(1, 3), keepdim=False)[:, None].expand(keys.shape[:3])
        ),
        "those are the slots in order of their norm; asked for is a score for each slot": _scored(
            lambda keys: keys.norm(dim=-1).argsort(-1).float()
        ),
        "the norm is not used: no slot comes before another": _scored(
            lambda keys: torch.zeros(keys.shape[:3])
        ),
        "the newest tokens may go here: they stay by rule": _scored(
            window=lambda positions, last, recent: torch.zeros_like(positions).bool()
        ),
        "only the newest token is safe; the `recent` newest are": _scored(
            window=lambda positions, last, recent: positions == last
        ),
        "one token too many is safe: with `recent` = 1 it is the newest alone": _scored(
            window=lambda positions, last, recent: positions >= last - recent
        ),
        "the first tokens may go here: positions below `sinks` stay by rule": _scored(
            first=lambda positions, sinks: torch.zeros_like(positions).bool()
        ),
        "one sink too many: positions start at 0, so `sinks` of them lie below `sinks`": _scored(
            first=lambda positions, sinks: positions <= sinks
        ),
        "the last slots are taken for the newest tokens; a slot may hold any token, look at `positions`": _scored(
            window=lambda positions, last, recent: (
                torch.arange(positions.shape[-1]) >= positions.shape[-1] - recent
            ).expand_as(positions)
        ),
        "the first slots are taken for the first tokens; a slot may hold any token, look at `positions`": _scored(
            first=lambda positions, sinks: (torch.arange(positions.shape[-1]) < sinks).expand_as(positions)
        ),
        "an empty slot (position -1) counts as a first token here: it comes below all others": _scored(
            empty=lambda positions: torch.zeros_like(positions).bool()
        ),
        "what stays by rule comes below all others: turn the sign of the infinity": _scored(above=-torch.inf),
        "the newest token of all heads together is looked for; each head holds tokens of its own": _scored(
            newest=lambda positions: positions.amax() + 1
        ),
        "the neighbours have no say: a token scores as the best one within `reach` of it": _scored(
            near=lambda apart, reach: apart == 0
        ),
        "the neighbours' mean is taken; a token scores as the best of them, so that a name stays whole": _scored(
            among=_mean
        ),
        "the worst neighbour decides here; it is the best": _scored(
            among=lambda scores: scores.masked_fill(scores.isinf(), torch.inf).amin(-1)
        ),
        "one neighbour too few: a token at a distance of `reach` counts": _scored(
            near=lambda apart, reach: apart < reach + (reach == 0)
        ),
        "one neighbour too many: no further than `reach`": _scored(
            near=lambda apart, reach: apart <= reach + (reach > 0)
        ),
        "neighbouring slots are taken for neighbouring tokens; look at `positions`": _scored(
            apart=lambda positions: _apart(torch.arange(positions.shape[-1]).expand_as(positions))
        ),
        "only the tokens before it count as neighbours here; those after it do, too": _scored(
            apart=lambda positions: (
                (positions[..., :, None] - positions[..., None, :])
                .float()
                .masked_fill(positions[..., :, None] < positions[..., None, :], torch.inf)
            )
        ),
        "an empty slot counts as a neighbour: its key is none": _scored(
            there=lambda positions: torch.ones_like(positions).bool()
        ),
    },
    "small keys stay with their neighbours, the first and the newest in any case, and an empty slot never",
    alike=_same_ranking,
    grows=(
        "small keys first, and the newest token stays",
        "the newest three stay, in every row and head",
        "the first tokens stay, too",
        "slots in which the tokens stand in any order",
        "a row that is shorter, with empty slots",
        "tokens that score as their best neighbour",
        "neighbours in any order, beside empty slots",
    ),
    signs={
        "that is a mask; asked for is a score for each slot, by which the slots can be ordered": (
            lambda r, keys, *more: r.shape == keys.shape[:3] and set(r.unique().tolist()) <= {0, 1}
        ),
        "slots with different norms get the same score: do not round or cut off": (
            lambda r, keys, positions, sinks, recent, reach: (
                not reach and r.shape == keys.shape[:3] and len(r.unique()) < r.numel() / 3
            )
        ),
        "the largest keys come first: high scores stay, so the sign must turn": (
            lambda r, keys, *more: torch.equal(r.argsort(-1), keys.norm(dim=-1).argsort(-1))
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
