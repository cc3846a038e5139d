"""Chapter 9: page bounds, ragged heads, and which method for whom."""

import torch

from course.teaching.check.answer import same_members
from course.teaching.check.exercise import Choice, Exercise

# 1. Quest: the pages with the largest bounds.


def _pages(query, keys, page, count, bound):
    """The `count` pages with the largest bound(query, low, high, rows)."""
    found = [bound(query, rows.min(0).values, rows.max(0).values, rows) for rows in keys.split(page)]
    return torch.stack(found).topk(count).indices.sort().values.tolist()


def _upper(query, low, high, rows):
    return torch.maximum(query * low, query * high).sum()


def _fetch_pages(query, keys, page, count):
    return _pages(query, keys, page, count, _upper)


def _with(bound):
    return lambda query, keys, page, count: _pages(query, keys, page, count, bound)


def _whole_pages(query, keys, page, count):
    whole = keys[: len(keys) // page * page]
    return _pages(query, whole, page, min(count, len(whole) // page), _upper)


def _tokens(query, keys, page, count):
    return (keys @ query).topk(count).indices.sort().values.tolist()


def _tokens_of_pages(query, keys, page, count):
    chosen = _fetch_pages(query, keys, page, count)
    return [t for p in chosen for t in range(p * page, min((p + 1) * page, len(keys)))]


def _first_tokens(query, keys, page, count):
    return [p * page for p in _fetch_pages(query, keys, page, count)]


def _mask(query, keys, page, count):
    chosen = _fetch_pages(query, keys, page, count)
    return [p in chosen for p in range(-(-len(keys) // page))]


def _bounds(query, keys, page, count):
    return torch.stack([_upper(query, r.min(0).values, r.max(0).values, r) for r in keys.split(page)])


def _smallest(query, keys, page, count):
    return _bounds(query, keys, page, count).topk(count, largest=False).indices.tolist()


def _as_many_pages(query, keys, page, count):
    return _pages(query, keys, -(-len(keys) // page), min(count, page), _upper)


def _cases():
    draw = torch.Generator().manual_seed(19)
    made = []
    for tokens, width, page, count in (
        (40, 8, 8, 2),
        (45, 6, 7, 3),
        (64, 16, 16, 1),
        (33, 4, 4, 4),
        (9, 5, 4, 1),
    ):
        keys = torch.randn(tokens, width, generator=draw)
        keys[tokens // 2] += 3 * torch.randn(width, generator=draw)
        made.append((torch.randn(width, generator=draw), keys, page, count))
    keys = torch.zeros(10, 3)  # the best key is in the short last page; negative channels decide
    keys[9] = torch.tensor([-4.0, -4.0, 0.0])
    keys[1] = torch.tensor([2.0, 0.0, 1.0])
    made.append((torch.tensor([-1.0, -1.0, 0.5]), keys, 4, 1))
    return made


fetch_pages = Exercise(
    "fetch_pages",
    _fetch_pages,
    _cases,
    {
        "only the largest values are used: where the query is negative, the smallest value gives more": (
            _with(lambda q, low, high, rows: (q * high).sum())
        ),
        "only the smallest values are used: where the query is positive, the largest value gives more": (
            _with(lambda q, low, high, rows: (q * low).sum())
        ),
        "the smaller product of each channel is no upper bound: take the larger one (torch.maximum)": (
            _with(lambda q, low, high, rows: torch.minimum(q * low, q * high).sum())
        ),
        "the larger of two sums is too small: take the larger product channel by channel, then the sum": (
            _with(lambda q, low, high, rows: torch.maximum((q * low).sum(), (q * high).sum()))
        ),
        "those are the best scores of the keys themselves; only their smallest and largest values are here": (
            _with(lambda q, low, high, rows: (rows @ q).max())
        ),
        "that is the mean key of each page: a mean is no bound": (
            _with(lambda q, low, high, rows: q @ rows.mean(0))
        ),
        "that is the middle of each page: the smallest and largest values are added, not compared": (
            _with(lambda q, low, high, rows: (q * (low + high)).sum())
        ),
        "the magnitudes are compared: a large product below zero makes the bound smaller": (
            _with(lambda q, low, high, rows: torch.maximum((q * low).abs(), (q * high).abs()).sum())
        ),
        "that is how far the page reaches (largest minus smallest), whatever the query asks": (
            _with(lambda q, low, high, rows: (high - low).sum())
        ),
        "the largest channel decides here; the bound is the sum over all channels": (
            _with(lambda q, low, high, rows: torch.maximum(q * low, q * high).max())
        ),
        "the last page is missing where it is short; keys.split(page) keeps it": _whole_pages,
        "those are tokens with the largest scores; asked for are pages": _tokens,
        "those are the tokens of the right pages; asked for are the numbers of the pages": _tokens_of_pages,
        "those are the first tokens of the right pages; asked for are the pages, by number": _first_tokens,
        "that is a mask over the pages; asked for are the numbers of those that are fetched": _mask,
        "those are the bounds of all pages; asked for are the numbers of the largest": _bounds,
        "those are the largest bounds; asked for are the numbers of their pages": (
            lambda q, k, p, c: _bounds(q, k, p, c).topk(c).values
        ),
        "those are the pages with the smallest bounds": _smallest,
        "pages are counted from 0": lambda q, k, p, c: [i + 1 for i in _fetch_pages(q, k, p, c)],
        "there are `page` pages here; each page has `page` tokens": _as_many_pages,
        "all pages are fetched; asked for are the `count` best": lambda q, k, p, c: list(
            range(-(-len(k) // p))
        ),
    },
    "the pages whose bounds are largest, from two values a channel",
    alike=same_members,
    holds="indices",
    signs={
        "you return more pages than `count`": lambda r, q, k, p, c: r.numel() > c,
        "you return fewer pages than `count`": lambda r, q, k, p, c: r.numel() < c,
        "there is no page with that number": lambda r, q, k, p, c: bool((r >= -(-len(k) // p)).any()),
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
