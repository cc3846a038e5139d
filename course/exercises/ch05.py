# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 5: eviction."""

import torch

from course.teaching.check.answer import plain, same
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
    hidden=-torch.inf,
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
        weights = weigh(scores.masked_fill(later(asking.shape[1], tokens), hidden))
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
    draw = torch.Generator().manual_seed(81)  # each wrong mask is seen in one of the first three

    def made(heads, tokens, d, window, budget):
        k = torch.randn(heads, tokens, d, generator=draw)
        q = torch.randn(heads, tokens, d, generator=draw) * 2
        q[:, -1] += k[:, 3]  # the last query looks for token 3
        q[:, -window:-1] += 2 * k[:, -1:]  # the others would look at what they may not see yet
        q[:, -window::2] += k[:, -window::2]  # and every second one at itself
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
        "the mask hides a token from itself: each query of the window sees everything up to its own token": _keep(
            later=lambda window, tokens: torch.ones(window, tokens).triu(tokens - window).bool()
        ),
        "what a query may not look at gets -inf before the softmax; 0 is a score like any other": _keep(
            hidden=0.0
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

# 2. The planted bug: sums that do not add up.


def _added(
    old=lambda so_far, now: so_far + now, new=lambda so_far, now: now, give=lambda old, new: (old, new)
):
    """The sums with one part exchanged: those of held tokens, those of new ones, or how they are joined."""

    def add_up(so_far, received):
        if so_far is None:
            return received
        held = so_far.shape[-1]
        parts = give(old(so_far, received[..., :held]), new(so_far, received[..., held:]))
        return torch.cat(parts, dim=-1)

    return add_up


_add_up = _added()


def _of_the_last(so_far, received):
    if so_far is None:
        return received
    empty = torch.zeros(*received.shape[:-1], received.shape[-1] - so_far.shape[-1])
    return received + torch.cat([empty, so_far], dim=-1)


def _shared(so_far, received):
    total = _add_up(so_far, received)
    return total / total.sum(-1, keepdim=True)


def _over_heads(so_far, received):
    total = _add_up(so_far, received)
    return total if so_far is None else total.sum(1, keepdim=True).expand_as(total)


def _frozen(so_far, received):
    if so_far is None:
        return received
    held = so_far.shape[-1]
    return torch.cat([so_far, received[..., held:]], dim=-1)


def _passes():
    draw = torch.Generator().manual_seed(25)

    def made(batch, heads, held, new):
        so_far = None if held is None else torch.rand(batch, heads, held, generator=draw) * 3
        slots = new if held is None else held + new
        return so_far, torch.randn(batch, heads, slots, generator=draw).mul(2).softmax(-1)

    return [made(1, 2, None, 6), made(1, 2, 6, 1), made(1, 3, 9, 1), made(2, 2, 7, 1), made(2, 3, 8, 4)]


add_up = Exercise(
    "add_up",
    _add_up,
    _passes,
    {
        "what held tokens receive in this pass is lost: only new tokens get a sum": _added(
            old=lambda so_far, now: so_far
        ),
        "only this pass counts: the sums of all earlier ones are forgotten": _added(
            old=lambda so_far, now: now
        ),
        "the larger of the two stays; H2O adds them": _added(old=torch.maximum),
        "that is the mean of the two; H2O adds them": _added(old=lambda so_far, now: (so_far + now) / 2),
        "the sums fade a little at every pass; H2O forgets nothing": _added(
            old=lambda so_far, now: 0.9 * so_far + now
        ),
        "the two are multiplied; H2O adds them": _added(old=torch.mul),
        "subtracted: a token that is looked at becomes lighter": _added(old=lambda so_far, now: so_far - now),
        "the earlier sums are added to the last slots; the tokens that were held are the first ones": _of_the_last,
        "the new tokens are missing: the next pass has a sum for every slot": _added(
            give=lambda old, new: (old,)
        ),
        "the new tokens stand in front: they come behind those that were held": _added(
            give=lambda old, new: (new, old)
        ),
        "a new token begins with nothing; it begins with what it received in this pass": _added(
            new=lambda so_far, now: torch.zeros_like(now)
        ),
        "a new token begins with the largest sum of all, so it can never be the lightest": _added(
            new=lambda so_far, now: so_far.amax(-1, keepdim=True) + now
        ),
        "what a new token received is counted twice": _added(new=lambda so_far, now: 2 * now),
        "the sums are divided by their total; how much was received in all must stay": _shared,
        "the heads are added up: each KV head has sums of its own": _over_heads,
    },
    "every query gives away a weight of 1, and now none of it is lost",
    given=_frozen,
    signs={
        "all held tokens grow by the same; each sum grows by what its own token received": (
            lambda r, so_far, received: same(
                r[..., : so_far.shape[-1]] - so_far, (r[..., :1] - so_far[..., :1]).expand_as(so_far)
            )
        ),
        "the sums have another total: every query gives away a weight of 1, no more and no less": (
            lambda r, so_far, received: (
                abs(float(r.sum() - received.sum() - (0 if so_far is None else so_far.sum()))) > 1e-3
            )
        ),
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
