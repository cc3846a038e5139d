# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 5: eviction."""

import torch

from course.teaching.check.answer import plain, same_members
from course.teaching.check.exercise import Choice, Exercise

# 1. SnapKV: the end of the prompt chooses.


def _later(window, tokens):
    """What each of the last `window` queries may not look at, `[window, tokens]`."""
    return torch.ones(window, tokens).triu(tokens - window + 1).bool()


def _keep(
    asked=lambda q, window: q[:, -window:],
    later=_later,
    scale=lambda d: d**-0.5,
    weigh=lambda scores: scores.softmax(-1),
    together=lambda weights: weights.sum(1),
    outside=lambda seen, window: seen[:, :-window],
    best=lambda seen, count: seen.topk(count).indices,
    count=lambda budget, window: budget - window,
    newest=lambda tokens, window: torch.arange(tokens - window, tokens),
    give=lambda kept, tokens: kept,
):
    """SnapKV with one part exchanged."""

    def snapkv(q, k, window, budget):
        tokens = k.shape[1]
        asking = asked(q, window)
        scores = asking @ k.mT * scale(k.shape[-1])  # [heads, window, tokens]
        weights = weigh(scores.masked_fill(later(asking.shape[1], tokens), -torch.inf))
        seen = outside(together(weights), window)  # [heads, tokens - window]
        chosen = best(seen, count(budget, window))
        return give(torch.cat([chosen, newest(tokens, window).expand(len(k), -1)], dim=1), tokens)

    return snapkv


_snapkv = _keep()


def _row_by_row(one, other):
    """The same members in every row, in any order."""
    one, other = plain(one), plain(other)
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)) or one.shape != other.shape:
        return False
    return torch.equal(one.double().sort(-1).values, other.double().sort(-1).values)


def _prompts():
    draw = torch.Generator().manual_seed(15)

    def made(heads, tokens, d, window, budget):
        k = torch.randn(heads, tokens, d, generator=draw)
        q = torch.randn(heads, tokens, d, generator=draw) * 2
        q[:, -1] += k[:, 3]  # the last query looks for token 3
        q[:, -window:-1] += 2 * k[:, -1:]  # the others would look at what they may not see yet
        return q, k, window, budget

    return [
        made(1, 12, 4, 1, 4), made(1, 20, 8, 4, 9), made(3, 24, 8, 4, 10), made(2, 30, 16, 8, 12), made(4, 40, 8, 6, 7)
    ]  # fmt: skip


def _of_all_queries(q, k, window, budget):
    return _keep(asked=lambda q, window: q)(q, k, window, budget)


snapkv = Exercise(
    "snapkv",
    _snapkv,
    _prompts,
    {
        "the queries of the whole prompt have a say here, as in H2O: only the last `window` are asked": _of_all_queries,
        "only the very last query is asked; the last `window` of them are": _keep(
            asked=lambda q, window: q[:, -1:], later=lambda window, tokens: torch.zeros(window, tokens).bool()
        ),
        "the first queries are asked; the last ones know what comes next": _keep(
            asked=lambda q, window: q[:, :window]
        ),
        "a query of the window looks at later tokens: the causal mask is missing": _keep(
            later=lambda window, tokens: torch.zeros(window, tokens).bool()
        ),
        "the mask forgets that the window stands at the end: its first query may look at all tokens before it": _keep(
            later=lambda window, tokens: torch.ones(window, tokens).triu(1).bool(),
            weigh=lambda scores: scores.softmax(-1).nan_to_num(),
        ),
        "raw scores are added up; a softmax says which part of a query's attention a token gets": _keep(
            weigh=lambda scores: scores.masked_fill(scores.isinf(), 0.0)
        ),
        "the softmax runs over the queries; it runs over the tokens (dim=-1)": _keep(
            weigh=lambda scores: scores.softmax(1).nan_to_num()
        ),
        "the scores are not divided by the root of d": _keep(scale=lambda d: 1.0),
        "the scores are divided by d; divide by its root": _keep(scale=lambda d: 1 / d),
        "one strong look is enough here; SnapKV adds up what all queries of the window give": _keep(
            together=lambda weights: weights.amax(1)
        ),
        "the heads are added up, so all keep the same tokens; each head keeps its own": _keep(
            together=lambda weights: weights.sum((0, 1), keepdim=False).expand(len(weights), -1)
        ),
        "the least looked at stay: turn the choice around": _keep(
            best=lambda seen, count: seen.topk(count, largest=False).indices
        ),
        "the window may be chosen twice: choose among the tokens before it, then add it": _keep(
            outside=lambda seen, window: seen
        ),
        "the window comes on top of the budget: `budget` is what stays in all": _keep(
            count=lambda budget, window: budget
        ),
        "the window is not kept: without it the model has lost what it is just saying": _keep(
            newest=lambda tokens, window: torch.arange(0), count=lambda budget, window: budget
        ),
        "the newest token is gone: the window ends with the last token": _keep(
            newest=lambda tokens, window: torch.arange(tokens - window - 1, tokens - 1)
        ),
        "the first tokens are kept as the window; it is the last ones": _keep(
            newest=lambda tokens, window: torch.arange(window)
        ),
        "those are the attention weights that were found; asked for are the tokens": _keep(
            best=lambda seen, count: seen.topk(count).values
        ),
        "tokens are counted from 0": _keep(give=lambda kept, tokens: kept + 1),
        "that is a mask over the tokens; asked for are their numbers": _keep(
            give=lambda kept, tokens: torch.zeros(len(kept), tokens).scatter(1, kept, 1.0) > 0
        ),
    },
    "the last queries choose what stays, each head for itself, and the window stays in any case",
    alike=_row_by_row,
    holds="indices",
    grows=(
        "one head, a window of one query",
        "a window of several queries, none of which looks ahead",
        "several heads, each with tokens of its own",
        "a longer window",
        "a budget of the window and one more",
    ),
    signs={
        "a head keeps more tokens than `budget`": lambda r, q, k, window, budget: r.shape[-1] > budget,
        "a head keeps fewer tokens than `budget`": lambda r, q, k, window, budget: r.shape[-1] < budget,
        "a token is there twice: choose among the tokens before the window": lambda r, *case: any(
            len(row.unique()) < len(row) for row in r
        ),
        "the window is not whole: the last `window` tokens stay in every head": lambda r, q, k, window, budget: (
            any(not set(range(k.shape[1] - window, k.shape[1])) <= set(row.tolist()) for row in r)
        ),
    },
)

# 2. H2O: find the bug in the eviction.


def _heavy_hitters(received, budget, recent):
    """The heavy slots outside the window and the window, in order."""
    received = torch.as_tensor(received, dtype=torch.float32)
    window = len(received) - recent
    heavy = received[:window].topk(budget - recent).indices.sort().values
    return heavy.tolist() + list(range(window, len(received)))


def _scores():
    generator = torch.Generator().manual_seed(5)
    return [
        ((torch.rand(size, generator=generator) * weight), budget, recent)
        for size, budget, recent, weight in (
            (12, 6, 3, torch.linspace(1.5, 0.1, 12)),
            (20, 8, 4, torch.linspace(0.2, 2, 20)),
            (9, 5, 2, torch.tensor([1.0] * 8 + [9.0])),
        )
    ] + [(torch.tensor([5.5, 0.1, 0.2, 4.5, 0.1, 0.3, 0.05]), 3, 2)]  # sums of many steps, larger than 1


def _lightest(received, budget, recent):
    window = len(received) - recent
    return received[:window].topk(budget - recent, largest=False).indices.sort().values.tolist() + list(
        range(window, len(received))
    )


def _no_window(received, budget, recent):
    return received.topk(budget).indices.sort().values.tolist()


def _as_found(received, budget, recent):
    window = len(received) - recent  # the first slot of the window
    heavy = received.topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _window_may_be_heavy(received, budget, recent):
    heavy = received.topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _newest_evicted(received, budget, recent):
    window = len(received) - recent - 1
    heavy = received[:window].topk(budget - recent).indices.sort().values
    return heavy.tolist() + list(range(window, len(received) - 1))


def _window_raised_by_one(received, budget, recent):
    raised = received.clone()
    raised[-recent:] += 1
    return sorted(raised.topk(budget).indices.tolist())


def _lightest_of_all(received, budget, recent):
    heavy = received.topk(budget - recent, largest=False).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _window_on_top(received, budget, recent):
    window = len(received) - recent
    heavy = received[:window].topk(min(budget, window)).indices
    return sorted(heavy.tolist()) + list(range(window, len(received)))


def _window_cut_too_early(received, budget, recent):
    window = len(received) - recent - 1
    heavy = received[:window].topk(budget - recent).indices
    return sorted(heavy.tolist()) + list(range(window + 1, len(received)))


def _latest(received, budget, recent):
    return list(range(len(received) - budget, len(received)))


def _evicted(received, budget, recent):
    return sorted(set(range(len(received))) - set(_heavy_hitters(received, budget, recent)))


def _scores_instead(received, budget, recent):
    return [received[slot].item() for slot in _heavy_hitters(received, budget, recent)]


def _indices_of_the_window(received, budget, recent):
    heavy = received[: len(received) - recent].topk(budget - recent).indices
    return sorted(heavy.tolist()) + list(range(recent))


def _heavy_in_the_window(received, budget, recent):
    window = len(received) - recent
    heavy = received[-recent:].topk(min(budget - recent, recent)).indices + window
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _heavy_in_the_window_only(received, budget, recent):
    window = len(received) - recent
    heavy = received[window:].topk(budget - recent).indices + window
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _numbered_from_the_window(received, budget, recent):
    window = len(received) - recent
    heavy = received[window:].topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _first_cut_off(received, budget, recent):
    heavy = received[recent:].topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _oldest_kept(received, budget, recent):
    return list(range(budget - recent)) + list(range(len(received) - recent, len(received)))


heavy_hitters = Exercise(
    "heavy_hitters",
    _heavy_hitters,
    _scores,
    {
        "you kept the tokens with the least attention: those are to go": _lightest,
        "the recent window is missing: a new token has received little attention and would go at once": (
            _no_window
        ),
        "recent tokens took places of heavy ones: choose the heavy ones outside the window": (
            _window_may_be_heavy
        ),
        "the newest token is evicted: the window must end with the last slot": _newest_evicted,
        "received is a sum and may be larger than 1: what lifts the window must be more than all of it": (
            _window_raised_by_one
        ),
        "you kept the tokens with the least attention, and chose them in the window, too": _lightest_of_all,
        "budget heavy ones and the window on top: the window is part of the budget": _window_on_top,
        "the token just before the window can never stay: the part before it ends at `window`": (
            _window_cut_too_early
        ),
        "only the window is left: that is a sliding window, nothing heavy stays": _latest,
        "those are the slots that go; asked for are the ones that stay": _evicted,
        "those are the scores; asked for are the numbers of the slots": _scores_instead,
        "the window stands at the front: its slots are the last `recent` ones": _indices_of_the_window,
        "the heavy ones are looked for inside the window, where all stay anyway": _heavy_in_the_window,
        "the heavy ones are looked for inside the window, where all stay anyway; it may also be too short": (
            _heavy_in_the_window_only
        ),
        "received[window:] is the window itself, where all stay anyway: cut off what follows, [:window]": (
            _numbered_from_the_window
        ),
        "received[recent:] lacks the first slots, and counts from there: the window stands at the end": (
            _first_cut_off
        ),
        "the first slots stay, whatever they received: those are sinks, not heavy hitters": _oldest_kept,
    },
    "heavy ones and recent ones, each within its share of the budget",
    alike=same_members,
    holds="indices",
    given=_as_found,
    signs={
        "too few different slots: choose the heavy ones outside the window": lambda r, x, b, n: (
            len(set(r.tolist())) < b
        ),
        "more slots than the budget allows": lambda r, x, b, n: len(r) > b,
        "a recent slot is missing": lambda r, x, b, n: not set(range(len(x) - n, len(x))) <= set(r.tolist()),
    },
)

# 3. Decide: which method for which task.

design = Choice(
    "design",
    "b",
    {
        "a": "nine tenths of 60,000 tokens must go, and which detail will be asked for is known only after they have "
        "gone: H2O answered 1 of 12 such questions above",
        "b": "6,000 tokens hold the last 3,000 twice over, however long the day becomes; what was said in the morning "
        "may go, the text stays fluent, and the memory never grows",
        "c": "6,000 of 120,000 tokens are one page in twenty: the sinks hold four tokens, not the contract, and the "
        "clause that is asked for is gone",
        "d": "5,500 tokens fit into the room for 6,000, so there is nothing to evict; and exact copying needs every "
        "token, since any of them may be the next one",
    },
)
