# ruff: noqa: E501 (a sentence is one line)
"""Chapter 9: page bounds, ragged heads, and which method for whom."""

import torch

from course.teaching.check.answer import same, weights_of
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. A step of Quest: bounds, pages, and attention to what was fetched.


def _cases(draw):
    def made(heads, tokens, page, count, d=50):
        query, values = (torch.randn(*shape, d, generator=draw) for shape in ((heads,), (heads, tokens)))
        query *= 0.15  # so that no weight is nearly 0
        keys = torch.randn(heads, tokens, d, generator=draw)
        keys[:, tokens // 2] += 2 * torch.randn(heads, d, generator=draw)
        return query, keys, values, page, count

    best, worst = made(1, 8 * 4 + whole(draw, 1, 6), 8, 2), made(1, 8 * 4 + whole(draw, 1, 6), 8, 4)
    best[0].copy_(-best[0].abs())  # below zero the smallest value decides
    best[1][:, -1] = -3.0  # and the best page is the last, short one
    worst[0].abs_()
    worst[1].copy_(-worst[1].abs() - 0.5)  # every bound lies below zero
    worst[1][:, 32:] -= 0.5  # and the last, short page is the worst
    return [
        made(1, 12, 4, 3),
        made(1, whole(draw, 5, 6) * 8, 8, 2),
        best,
        worst,
        made(3, 48, 8, 2),
        made(4, whole(draw, 43, 47), 7, 3),
        made(2, 9, 4, 5),
    ]


def _weights(r, right, values):
    """The weight that the output gives to each token, `[heads, tokens]`."""
    return weights_of(r[:, None], values)[:, 0]


def _unlike(r, right, query, keys, values, page, count):
    """Whether tokens get weight that should not, and whether tokens get none that should."""
    mine, wanted = (_weights(one, right, values).abs() > 1e-6 for one in (r, right))
    return bool((mine & ~wanted).any()), bool((wanted & ~mine).any())


quest_step = Exercise(
    "quest_step",
    RIGHT["quest_step"],
    _cases,
    MISTAKES["quest_step"],
    "two values per channel choose the pages, and attention sees these pages alone",
    grows=(
        "one head, every page",
        "one head, some of the pages",
        "a negative query, and a short last page that is fetched",
        "negative keys, and a short last page that is not fetched",
        "three heads, each with pages of its own",
        "four heads, and pages that do not fit evenly",
        "more pages asked for than there are",
    ),
    signs={
        "the output is no weighted sum of the values": lambda r, right, q, k, v, *case: (
            not r.isnan().any() and weights_of(r[:, None], v) is None
        ),
        "too many pages are fetched": lambda *case: _unlike(*case) == (True, False),
        "tokens of the right pages get no weight": lambda *case: _unlike(*case) == (False, True),
        "attention sees other pages than those with the largest bounds": lambda *case: _unlike(*case)[0],
        "the right pages are fetched; the weights of their tokens do not add up to 1": lambda r, right, q, k, v, *case: (
            not same(_weights(r, right, v).sum(-1), torch.ones(len(r)))
        ),
        "the right pages are fetched, and the weights of their tokens are wrong": lambda r, right, q, k, v, *case: (
            _weights(r, right, v) is not None
        ),
    },
    shapes={"return one vector for each head, [heads, d]": lambda *case: True},
)


# 2. Ragged heads, with a bug.


def _as_found(scores, total):
    heads, tokens = scores.shape
    ranks = scores.argsort(-1).argsort(-1)  # from the worst token of a head to its best
    best = ranks.flatten().topk(total).indices
    return torch.bincount(best // tokens, minlength=heads).tolist()


def _score_cases(draw):
    made = [
        (torch.rand(heads, tokens, generator=draw) * (1 + 3 * torch.rand(heads, 1, generator=draw)), total)
        for heads, tokens, total in ((2, 6, 5), (4, 9, 13), (3, 20, 17), (8, 5, 11))
    ]
    nothing = torch.rand(3, 5, generator=draw) + torch.tensor([[3.0], [1.0], [0.0]])
    made.append((nothing, 6))  # the last head gets nothing
    made.append((-torch.rand(3, 4, generator=draw) * torch.tensor(shuffled(draw, [1, 3, 9]))[:, None], 5))
    ties = torch.rand(3, 6, generator=draw) + 1
    ties[whole(draw, 0, 2), :4] = 5.0  # only three of the four equal ones have a place
    made.append((ties, 3))
    return made


head_counts = Exercise(
    "head_counts",
    RIGHT["head_counts"],
    _score_cases,
    MISTAKES["head_counts"],
    "the heads compete for one budget",
    given=_as_found,
    holds="indices",
    signs={
        "the numbers of the heads do not add up to `total`": lambda r, right, s, total: int(r.sum()) != total,
        "the numbers add up to `total`, and a head gets more than it holds of the best tokens": lambda *case: (
            True
        ),
    },
    shapes={"return one number for each head": lambda *case: True},
)


# 3. Which method for the lawyers.

deploy = Choice(
    "deploy",
    "c",
    {
        "a": "snapkv needs the question when it cuts, and at night there is none: look at its second column",
        "b": "topk would answer well, but it fetches over the link at every step, and the link is busy",
        "c": "the questions are not known, the model is given, and reading twice at night costs little",
        "d": "that is the smallest cache of all, but the model is given and may not be retrained",
    },
)
