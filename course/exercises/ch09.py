# ruff: noqa: E501 (a sentence is one line)
"""Chapter 9: page bounds, ragged heads, and which method for whom."""

import torch

from course.teaching.check.answer import same, weights_of
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

# 1. A step of Quest: bounds, pages, and attention to what was fetched.


def _of_pages(x, page):
    """`[heads, tokens, d]` cut into pages, the last one may be short."""
    return x.split(page, dim=1)


def _step(
    bound=lambda query, low, high, rows: torch.maximum(query * low, query * high).sum(-1),
    cut=_of_pages,
    take=lambda bounds, count: bounds.topk(min(count, bounds.shape[1])).indices,
    page_of=lambda tokens, page: torch.arange(tokens) // page,
    scale=lambda d: d**-0.5,
    cover=lambda scores, fetched: scores.masked_fill(~fetched, -torch.inf).softmax(-1),
    give=lambda weights, values, query: (weights[:, None] @ values)[:, 0],
):
    """A step with one part exchanged."""

    def quest_step(query, keys, values, page, count):
        tokens, d = keys.shape[1:]
        bounds = torch.stack(
            [bound(query, rows.amin(1), rows.amax(1), rows) for rows in cut(keys, page)], dim=1
        )  # [heads, pages]
        chosen = take(bounds, count).expand(len(keys), -1)  # [heads, count]
        fetched = (page_of(tokens, page) == chosen[..., None]).any(1)  # [heads, tokens]
        scores = (keys @ query[..., None])[..., 0] * scale(d)
        return give(cover(scores, fetched), values, query)

    return quest_step


_quest_step = _step()


def _whole_pages(x, page):
    whole = x[:, : max(page, x.shape[1] // page * page)]
    return whole.split(page, dim=1)


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
    """Tokens that get weight and should not, and tokens that should and get none, `[heads, tokens]` each."""
    mine, wanted = (_weights(one, right, values).abs() > 1e-6 for one in (r, right))
    return mine & ~wanted, wanted & ~mine


quest_step = Exercise(
    "quest_step",
    _quest_step,
    _cases,
    {
        "only the largest values are used: where the query is negative, the smallest value gives more": _step(
            lambda q, low, high, rows: (q * high).sum(-1)
        ),
        "only the smallest values are used: where the query is positive, the largest value gives more": _step(
            lambda q, low, high, rows: (q * low).sum(-1)
        ),
        "the smaller product of each channel is no upper bound: take the larger one (torch.maximum)": _step(
            lambda q, low, high, rows: torch.minimum(q * low, q * high).sum(-1)
        ),
        "the larger of two sums is too small: take the larger product of each channel, then the sum": _step(
            lambda q, low, high, rows: torch.maximum((q * low).sum(-1), (q * high).sum(-1))
        ),
        "you choose the pages by their keys: only the smallest and largest values are on the device": _step(
            lambda q, low, high, rows: (rows @ q[..., None])[..., 0].amax(-1)
        ),
        "you choose the pages by their mean key: a mean is no bound": _step(
            lambda q, low, high, rows: (q * rows.mean(1)).sum(-1)
        ),
        "you add the smallest and the largest value: take the larger of their products": _step(
            lambda q, low, high, rows: (q * (low + high)).sum(-1)
        ),
        "you take magnitudes: a product below zero makes the bound smaller": _step(
            lambda q, low, high, rows: torch.maximum((q * low).abs(), (q * high).abs()).sum(-1)
        ),
        "you choose pages by largest minus smallest value: the query must have a say": _step(
            lambda q, low, high, rows: (high - low).sum(-1)
        ),
        "the largest channel decides: the bound is the sum over all channels": _step(
            lambda q, low, high, rows: torch.maximum(q * low, q * high).amax(-1)
        ),
        "the last page is missing where it is short: split(page, dim=1) keeps it": _step(cut=_whole_pages),
        "the pages with the smallest bounds are fetched: take the largest": _step(
            take=lambda bounds, count: bounds.topk(min(count, bounds.shape[1]), largest=False).indices
        ),
        "the last pages are fetched: take those with the largest bounds": _step(
            take=lambda bounds, count: torch.arange(bounds.shape[1]).flip(0)[:count]
        ),
        "head 0 chooses the pages for all heads: each has its own bounds": _step(
            take=lambda bounds, count: bounds[:1].topk(min(count, bounds.shape[1])).indices
        ),
        "the bounds of all heads are added up: each head fetches its own pages": _step(
            take=lambda bounds, count: bounds.sum(0, keepdim=True).topk(min(count, bounds.shape[1])).indices
        ),
        "all pages are fetched: fetch `count` of them": _step(
            take=lambda bounds, count: torch.arange(bounds.shape[1])
        ),
        "one page too few is fetched": _step(
            take=lambda bounds, count: bounds.topk(max(1, min(count, bounds.shape[1]) - 1)).indices
        ),
        "only the first token of each page is attended to: a page is fetched whole": _step(
            page_of=lambda tokens, page: torch.where(
                torch.arange(tokens) % page == 0, torch.arange(tokens) // page, -1
            )
        ),
        "the wrong tokens belong to your pages: token t lies in page t // page, counted from 0": _step(
            page_of=lambda tokens, page: torch.arange(tokens) // page + 1
        ),
        "you take the remainder: token t lies in page t // page": _step(
            page_of=lambda tokens, page: torch.arange(tokens) % page
        ),
        "the mask comes after the softmax, so the weights do not add up to 1: mask before it": _step(
            cover=lambda scores, fetched: scores.softmax(-1) * fetched
        ),
        "a masked score of 0 still gets weight: mask with minus infinity": _step(
            cover=lambda scores, fetched: (scores * fetched).softmax(-1)
        ),
        "the mask is reversed: attention goes to what was not fetched": _step(
            cover=lambda scores, fetched: scores.masked_fill(fetched, -torch.inf).softmax(-1).nan_to_num()
        ),
        "the scores are not divided by the root of d": _step(scale=lambda d: 1.0),
        "the scores are divided by d: divide by its root": _step(scale=lambda d: 1 / d),
        "the softmax is missing: the scores themselves weigh the values": _step(
            cover=lambda scores, fetched: scores.masked_fill(~fetched, 0.0)
        ),
        "those are the weights: multiply the values by them": _step(
            give=lambda weights, values, query: weights
        ),
    },
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
        "too many pages are fetched": lambda *case: _unlike(*case)[0].any() and not _unlike(*case)[1].any(),
        "tokens of the right pages get no weight": lambda *case: (
            _unlike(*case)[1].any() and not _unlike(*case)[0].any()
        ),
        "attention sees other pages than those with the largest bounds": lambda *case: _unlike(*case)[
            0
        ].any(),
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


def _head_counts(scores, total):
    heads, tokens = scores.shape
    best = scores.flatten().topk(total).indices
    return torch.bincount(best // tokens, minlength=heads).tolist()


def _as_found(scores, total):
    heads, tokens = scores.shape
    ranks = scores.argsort(-1).argsort(-1)  # from the worst token of a head to its best
    best = ranks.flatten().topk(total).indices
    return torch.bincount(best // tokens, minlength=heads).tolist()


def _counted(worth):
    def counts(scores, total):
        heads, tokens = scores.shape
        return torch.bincount(worth(scores).flatten().topk(total).indices // tokens, minlength=heads).tolist()

    return counts


def _by_token(scores, total):
    tokens = scores.shape[1]
    return torch.bincount(scores.flatten().topk(total).indices % tokens, minlength=tokens).tolist()


def _by_heads(scores, total):
    heads = len(scores)
    return torch.bincount(scores.flatten().topk(total).indices // heads, minlength=heads).tolist()


def _short(scores, total):
    return torch.bincount(scores.flatten().topk(total).indices // scores.shape[1]).tolist()


def _equal(scores, total):
    return [total // len(scores)] * len(scores)


def _share(scores, total):
    part = scores.softmax(-1).sum(-1) if scores.min() < 0 else scores.sum(-1)
    return (total * part / part.sum()).round().long().tolist()


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
    _head_counts,
    _score_cases,
    {
        "ranks inside a head are the same numbers in every head: compare the scores themselves": _as_found,
        "you divide the scores by the sum of their head: compare the scores themselves": _counted(
            lambda s: s / s.sum(-1, keepdim=True)
        ),
        "you divide the scores by the largest of their head: compare the scores themselves": _counted(
            lambda s: s / s.amax(-1, keepdim=True)
        ),
        "you take a softmax inside each head: compare the scores themselves": _counted(
            lambda s: s.softmax(-1)
        ),
        "you subtract the mean of each head: compare the scores themselves": _counted(
            lambda s: s - s.mean(-1, keepdim=True)
        ),
        "you give all heads the same mean and spread: compare the scores themselves": _counted(
            lambda s: (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)
        ),
        "those are reversed ranks, and ranks are the same in every head: compare the scores themselves": _counted(
            lambda s: (-s).argsort(-1).argsort(-1)
        ),
        "one argsort gives places, neither ranks nor scores: compare the scores themselves": _counted(
            lambda s: s.argsort(-1)
        ),
        "the lowest scores are kept: keep the highest": _counted(lambda s: -s),
        "you count by token: a place in the flat list is head * tokens + token, so divide by tokens": _by_token,
        "you divide by the number of heads: a place in the flat list is divided by the number of tokens": _by_heads,
        "heads that get nothing are missing at the end: minlength=heads": _short,
        "every head gets the same: keep the best of all heads together": _equal,
        "you share the total by the sums of the scores: count the best tokens instead": _share,
        "you compare magnitudes: a score below zero is a low one": _counted(lambda s: s.abs()),
        "those are the places of the best tokens: return how many each head holds": (
            lambda s, total: s.flatten().topk(total).indices
        ),
        "you count what each head loses: count what it holds": (
            lambda s, total: [s.shape[1] - held for held in _head_counts(s, total)]
        ),
        "you rank each token across the heads: compare the scores themselves": _counted(
            lambda s: s.argsort(0).argsort(0)
        ),
    },
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
