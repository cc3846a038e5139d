# ruff: noqa: E501 (a sentence is one line)
"""Chapter 8: comparing methods, the score of one's own."""

import torch

from course.teaching.check.answer import plain, same_shape
from course.teaching.check.exercise import Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. A Keep of one's own: small keys stay with their neighbours, and what must stay by rule.


def _same_ranking(one, other):
    """The same slots above and below all others, and the same order among the rest, whatever the scores are."""
    one, other = plain(one), plain(other)
    if not same_shape(one, other) or one.dim() != 3 or one.isnan().any():
        return False
    one, rest = one.double(), other.isfinite()
    above, should = (x[..., :, None] > x[..., None, :] for x in (one, other))
    both = rest[..., :, None] & rest[..., None, :]
    near, alike = (_near(x.where(rest, 0).double(), part) for x, part in ((one, 1e-5), (other, 1e-6)))
    right = torch.where(
        alike, near, above == should
    )  # neighbours may share a score: rounding decides nothing
    return bool(above[should & ~both].all() and right[both].all())


def _near(score, part):
    """Which two slots of a row and head have scores that differ by no more than this part of the largest."""
    return (score[..., :, None] - score[..., None, :]).abs() <= part * score.abs().amax(-1)[..., None, None]


def _slots(draw):
    def made(batch, heads, slots, d, sinks, recent, mixed=False, empty=0, reach=0, size=1.0):
        keys = torch.randn(batch, heads, slots, d, generator=draw) * size
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
        made(2, 2, 10, 8, 1, 0, empty=3, size=1e6),
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
    RIGHT["norm_score"],
    _slots,
    MISTAKES["norm_score"],
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
        "large keys, and no newest token that stays",
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
            _discordant(r, right, False) and not any(_discordant(-r, right, equal) for equal in (False, True))
        ),
        "a token has the score infinity, and its position is neither below `sinks` nor one of the last `recent` numbers": (
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
        "a token has the score minus infinity, like an empty slot: is its own distance, 0, within `reach`?": (
            lambda r, right, *case: (r[right > -torch.inf] == -torch.inf).any()
        ),
        "slots with different norms get the same score": lambda r, right, keys, positions, sinks, recent, reach: (
            not reach and _discordant(r, right, True)
        ),
        "a key with a larger norm comes before one with a smaller norm": (
            lambda r, right, keys, positions, sinks, recent, reach: not reach and _discordant(r, right, False)
        ),
        "a token does not score as the best one within `reach` of it": lambda *case: case[-1],  # reach
    },
    shapes={"return one score for each slot: [batch, kv_heads, slots]": lambda *case: True},
)
