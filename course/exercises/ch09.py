"""Chapter 9: page bounds, ragged heads, and which method for whom."""

import torch

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


def _cases():
    draw = torch.Generator().manual_seed(19)

    def made(heads, tokens, d, page, count, negative=False):
        query, values = (
            torch.randn(heads, d, generator=draw) * 2,
            torch.randn(heads, tokens, d, generator=draw),
        )
        keys = torch.randn(heads, tokens, d, generator=draw)
        keys[:, tokens // 2] += 3 * torch.randn(heads, d, generator=draw)
        if negative:  # below zero the smallest value of a page decides; the best page is the last, short one
            query, keys[:, -1] = -query.abs(), -3.0
        return query, keys, values, page, count

    return [
        made(1, 12, 6, 4, 3),
        made(1, 40, 8, 8, 2),
        made(1, 37, 6, 8, 2, negative=True),
        made(3, 48, 8, 8, 2),
        made(4, 45, 16, 7, 3),
        made(2, 9, 5, 4, 5),
    ]


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
        "the pages are chosen by their keys; only the smallest and largest values are on the device": _step(
            lambda q, low, high, rows: (rows @ q[..., None])[..., 0].amax(-1)
        ),
        "the mean key chooses the pages: a mean is no bound": _step(
            lambda q, low, high, rows: (q * rows.mean(1)).sum(-1)
        ),
        "the middle of each page chooses: the smallest and largest values are added, not compared": _step(
            lambda q, low, high, rows: (q * (low + high)).sum(-1)
        ),
        "the magnitudes are compared: a large product below zero makes the bound smaller": _step(
            lambda q, low, high, rows: torch.maximum((q * low).abs(), (q * high).abs()).sum(-1)
        ),
        "pages are chosen by how far they reach (largest minus smallest), whatever the query asks": _step(
            lambda q, low, high, rows: (high - low).sum(-1)
        ),
        "the largest channel decides here; the bound is the sum over all channels": _step(
            lambda q, low, high, rows: torch.maximum(q * low, q * high).amax(-1)
        ),
        "the last page is missing where it is short; split(page, dim=1) keeps it": _step(cut=_whole_pages),
        "the pages with the smallest bounds are fetched": _step(
            take=lambda bounds, count: bounds.topk(min(count, bounds.shape[1]), largest=False).indices
        ),
        "the last pages are fetched; asked for are those with the largest bounds": _step(
            take=lambda bounds, count: torch.arange(bounds.shape[1]).flip(0)[:count]
        ),
        "head 0 chooses the pages for all heads; each has bounds of its own": _step(
            take=lambda bounds, count: bounds[:1].topk(min(count, bounds.shape[1])).indices
        ),
        "the bounds of all heads are added up; each head fetches its own pages": _step(
            take=lambda bounds, count: bounds.sum(0, keepdim=True).topk(min(count, bounds.shape[1])).indices
        ),
        "all pages are fetched, so that nothing is saved": _step(
            take=lambda bounds, count: torch.arange(bounds.shape[1])
        ),
        "one page too few": _step(
            take=lambda bounds, count: bounds.topk(max(1, min(count, bounds.shape[1]) - 1)).indices
        ),
        "the first token of each page is attended to; a page is fetched whole": _step(
            page_of=lambda tokens, page: torch.where(
                torch.arange(tokens) % page == 0, torch.arange(tokens) // page, -1
            )
        ),
        "pages are counted from 0": _step(page_of=lambda tokens, page: torch.arange(tokens) // page + 1),
        "token t lies on page t // page; the remainder is its place in it": _step(
            page_of=lambda tokens, page: torch.arange(tokens) % page
        ),
        "what was not fetched still takes its part of the softmax: mask before it, not after": _step(
            cover=lambda scores, fetched: scores.softmax(-1) * fetched
        ),
        "a masked score of 0 still gets weight: mask with minus infinity": _step(
            cover=lambda scores, fetched: (scores * fetched).softmax(-1)
        ),
        "the mask is turned around: attention goes to what was not fetched": _step(
            cover=lambda scores, fetched: scores.masked_fill(fetched, -torch.inf).softmax(-1).nan_to_num()
        ),
        "the scores are not divided by the root of d": _step(scale=lambda d: 1.0),
        "the scores are divided by d; divide by its root": _step(scale=lambda d: 1 / d),
        "no softmax: the scores themselves weigh the values": _step(
            cover=lambda scores, fetched: scores.masked_fill(~fetched, 0.0)
        ),
        "those are the weights; asked for is what they make of the values": _step(
            give=lambda weights, values, query: weights
        ),
    },
    "two values a channel choose the pages, and attention sees these alone",
    grows=(
        "one head, every page",
        "one head, two pages of five",
        "a negative query, and a short last page",
        "three heads, each with pages of its own",
        "four heads, and pages that do not fit evenly",
        "more pages asked for than there are",
    ),
    signs={
        "asked for is one vector for each head, [heads, d]": lambda r, q, *case: r.shape != q.shape,
        "attention saw other tokens than those of the chosen pages": lambda r, q, k, v, p, c: (
            r.shape == q.shape and not r.isnan().any()
        ),
    },
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


def _score_cases():
    draw = torch.Generator().manual_seed(29)
    made = [
        (torch.rand(heads, tokens, generator=draw) * (1 + 3 * torch.rand(heads, 1, generator=draw)), total)
        for heads, tokens, total in ((2, 6, 5), (4, 9, 13), (3, 20, 17), (8, 5, 11))
    ]
    made.append((torch.tensor([[9.0, 8.0, 7.0, 6.5], [1.0, 2.0, 3.0, 0.5]]), 4))  # the last head gets nothing
    made.append((torch.tensor([[-1.0, -5.0, -6.0], [-2.0, -3.0, -4.0], [-9.0, -8.0, -7.0]]), 4))
    return made


head_counts = Exercise(
    "head_counts",
    _head_counts,
    _score_cases,
    {
        "ranks inside a head are the same numbers in every head: compare the scores themselves": _as_found,
        "scores that are divided by their head's sum cannot be compared with another head's": _counted(
            lambda s: s / s.sum(-1, keepdim=True)
        ),
        "scores that are divided by their head's largest give every head the same best token": _counted(
            lambda s: s / s.amax(-1, keepdim=True)
        ),
        "a softmax inside each head makes all heads alike: compare the scores themselves": _counted(
            lambda s: s.softmax(-1)
        ),
        "the mean of each head was taken away: a head that deserves more no longer gets it": _counted(
            lambda s: s - s.mean(-1, keepdim=True)
        ),
        "scores brought to the same spread in every head cannot say which head deserves more": _counted(
            lambda s: (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)
        ),
        "the ranks are turned around now, and still ranks: compare the scores themselves": _counted(
            lambda s: (-s).argsort(-1).argsort(-1)
        ),
        "those are places in order, no ranks and no scores: compare the scores themselves": _counted(
            lambda s: s.argsort(-1)
        ),
        "the lowest scores are kept: the sign is turned": _counted(lambda s: -s),
        "that is one number for each token: a place in the flat list is head * tokens + token": _by_token,
        "a place in the flat list is divided by the number of tokens, not of heads": _by_heads,
        "heads that get nothing are missing at the end: minlength=heads": _short,
        "every head gets the same here; the best of all heads together should stay": _equal,
        "that shares the total by the sum of the scores; asked for is who holds the best tokens": _share,
        "the magnitudes are compared; a score below zero is a low one": _counted(lambda s: s.abs()),
        "those are the places of the best tokens; asked for is how many each head holds": (
            lambda s, total: s.flatten().topk(total).indices
        ),
        "that counts what each head loses; asked for is what it holds": (
            lambda s, total: [s.shape[1] - held for held in _head_counts(s, total)]
        ),
        "the scores are ranked by token, across the heads: compare the scores themselves": _counted(
            lambda s: s.argsort(0).argsort(0)
        ),
    },
    "the heads compete for one budget",
    given=_as_found,
    holds="indices",
    signs={
        "asked for is one number for each head": lambda r, s, total: r.numel() != len(s),
        "the numbers of the heads do not add up to `total`": lambda r, s, total: int(r.sum()) != total,
    },
)


# 3. Which method for the lawyers.

deploy = Choice(
    "deploy",
    "c",
    {
        "a": "snapkv needs the question when it cuts; at night there is none: look at its second column",
        "b": "topk would answer well, but fetches over the link at every step, and the link is busy",
        "c": "nobody knows the questions, the model is given, and reading twice at night costs little",
        "d": "the smallest cache of all, but the model is given and may not be retrained",
    },
)
