# ruff: noqa: E501 (a sentence is one line)
"""Chapter 5: eviction."""

import torch

from course.teaching.check.answer import same, same_rows
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


def _prompts(draw):
    def made(heads, tokens, d, window, budget):
        k = torch.randn(heads, tokens, d, generator=draw)
        k += 1
        q = torch.randn(heads, tokens, d, generator=draw) * 2
        q[:, -window:-1] += k[:, -window + 1 :] - 1 if window > 1 else 0  # each would look at the next token
        q[:, -window::2] += k[:, -window::2] - 1  # and every second one looks at itself
        q[:, -window] -= 3  # all scores of the first one lie far below 0
        return q, k, window, budget

    return [
        made(1, 20, 8, 1, 7), made(1, 20, 8, 4, 9), made(3, 24, 8, 4, 10), made(2, 30, 16, 8, 12), made(4, 40, 8, 6, 7)
    ]  # fmt: skip


def _of_all_queries(q, k, window, budget):
    return _keep(asked=lambda q, window: q)(q, k, window, budget)


snapkv = Exercise(
    "snapkv",
    _snapkv,
    _prompts,
    {
        "all queries of the prompt are asked, as in H2O: ask the last `window` only": _of_all_queries,
        "only the very last query is asked: ask the last `window` of them": _keep(
            asked=lambda q, window: q[:, -1:], later=lambda window, tokens: torch.zeros(window, tokens).bool()
        ),
        "the first `window` queries are asked: ask the last ones": _keep(
            asked=lambda q, window: q[:, :window]
        ),
        "later tokens take part in the softmax: mask the scores before it": _keep(
            later=lambda window, tokens: torch.zeros(window, tokens).bool()
        ),
        "the mask forgets the tokens before the window: each query sees them all": _keep(
            later=lambda window, tokens: torch.ones(window, tokens).triu(1).bool(),
            weigh=lambda scores: scores.softmax(-1).nan_to_num(),
        ),
        "the mask hides a token from its own query: each query sees everything up to itself": _keep(
            later=lambda window, tokens: torch.ones(window, tokens).triu(tokens - window).bool()
        ),
        "the mask is off by one: each query of the window sees the token after it, too": _keep(
            later=lambda window, tokens: torch.ones(window, tokens).triu(tokens - window + 2).bool()
        ),
        "the window of queries is one too early: the last query must be asked": _keep(
            asked=lambda q, window: q[:, -window - 1 : -1]
        ),
        "a masked score gets 0, which is a score like any other: use -torch.inf": _keep(hidden=0.0),
        "you add up the scores: take the softmax first": _keep(
            weigh=lambda scores: scores.masked_fill(scores.isinf(), 0.0)
        ),
        "the softmax runs over the queries: it must run over the tokens (dim=-1)": _keep(
            weigh=lambda scores: scores.softmax(1).nan_to_num()
        ),
        "the scores are not divided by the root of d": _keep(scale=lambda d: 1.0),
        "the scores are divided by d: divide by its root": _keep(scale=lambda d: 1 / d),
        "you take the largest weight of any query: add up the weights of all queries": _keep(
            together=lambda weights: weights.amax(1)
        ),
        "the heads are added up, so all keep the same tokens: each head keeps its own": _keep(
            together=lambda weights: weights.sum((0, 1), keepdim=False).expand(len(weights), -1)
        ),
        "the tokens with the smallest sums stay: keep those with the largest": _keep(
            best=lambda seen, count: seen.topk(count, largest=False).indices
        ),
        "the choice includes the window: choose among the tokens before it, then add it": _keep(
            outside=lambda seen, window: seen
        ),
        "`budget` tokens stay besides the window: it counts the window, too": _keep(
            count=lambda budget, window: budget
        ),
        "the window is not kept: the last `window` tokens always stay": _keep(
            newest=lambda tokens, window: torch.arange(0), count=lambda budget, window: budget
        ),
        "the window that you keep ends one token too early": _keep(
            newest=lambda tokens, window: torch.arange(tokens - window - 1, tokens - 1)
        ),
        "you keep the first `window` tokens: keep the last ones": _keep(
            newest=lambda tokens, window: torch.arange(window)
        ),
        "those are the weights: return the tokens that have them (.indices)": _keep(
            best=lambda seen, count: seen.topk(count).values
        ),
        "every number is too large by 1: tokens are counted from 0": _keep(
            give=lambda kept, tokens: kept + 1
        ),
        "that is a mask over the tokens: return their numbers": _keep(
            give=lambda kept, tokens: torch.zeros(len(kept), tokens).scatter(1, kept, 1.0) > 0
        ),
    },
    "the last queries choose, each head for itself, and the window always stays",
    alike=same_rows,
    holds="indices",
    grows=(
        "one head, a window of one query",
        "a window of several queries, none of which looks ahead",
        "several heads, each with tokens of its own",
        "a longer window",
        "a budget of the window and one more",
    ),
    signs={
        "there is no such token: the last one is tokens - 1": lambda r, right, q, k, *case: (
            (r < 0).any() or (r >= k.shape[1]).any()
        ),
        "a head keeps a token twice": lambda r, *case: any(len(row.unique()) < len(row) for row in r),
        "the window is not whole: the last `window` tokens stay in every head": lambda r, right, q, k, window, budget: (
            any(not set(range(k.shape[1] - window, k.shape[1])) <= set(row.tolist()) for row in r)
        ),
        "the window is whole; among the tokens before it, others have larger sums": lambda *case: True,
    },
    shapes={
        "a head keeps more than `budget` tokens": lambda r, right, q, k, window, budget: r.shape[-1] > budget,
        "a head keeps fewer than `budget` tokens": lambda r, right, q, k, window, budget: (
            r.shape[-1] < budget
        ),
        "each head keeps `budget` tokens: [heads, budget]": lambda *case: True,
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


def _passes(draw):
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
        "held tokens receive nothing in this pass: add what they receive to their sums": _added(
            old=lambda so_far, now: so_far
        ),
        "only this pass counts: add it to the sums of the earlier ones": _added(old=lambda so_far, now: now),
        "you keep the larger of the two: H2O adds them": _added(old=torch.maximum),
        "that is the mean of the two: H2O adds them": _added(old=lambda so_far, now: (so_far + now) / 2),
        "the old sums become a tenth smaller at each pass: H2O keeps them whole": _added(
            old=lambda so_far, now: 0.9 * so_far + now
        ),
        "the two are multiplied: H2O adds them": _added(old=torch.mul),
        "you subtract: H2O adds the two": _added(old=lambda so_far, now: so_far - now),
        "the old sums are added to the last slots: the held tokens are the first ones": _of_the_last,
        "the new tokens are missing: every slot has a sum": _added(give=lambda old, new: (old,)),
        "the new tokens come first: they come after the held ones": _added(give=lambda old, new: (new, old)),
        "a new token begins with 0: it begins with what it received in this pass": _added(
            new=lambda so_far, now: torch.zeros_like(now)
        ),
        "a new token begins with the largest sum of all: it begins with what it received": _added(
            new=lambda so_far, now: so_far.amax(-1, keepdim=True) + now
        ),
        "what a new token received is counted twice": _added(new=lambda so_far, now: 2 * now),
        "the sums are divided by their total: leave them as they are": _shared,
        "the heads are added up: each KV head has its own sums": _over_heads,
    },
    "each query gives away a weight of 1, and none of it is lost now",
    given=_frozen,
    signs={
        "the sums of held tokens are right; those of new ones are not": lambda r, right, so_far, received: (
            same(r[..., : so_far.shape[-1]], right[..., : so_far.shape[-1]])
        ),
        "all held tokens of a head grow by the same: each grows by what it received": (
            lambda r, right, so_far, received: same(
                r[..., : so_far.shape[-1]] - so_far, (r[..., :1] - so_far[..., :1]).expand_as(so_far)
            )
        ),
        "the sums of new tokens are right; those of held ones are not": lambda r, right, so_far, received: (
            same(r[..., so_far.shape[-1] :], right[..., so_far.shape[-1] :])
        ),
        "the sums of held tokens are wrong, and those of new ones, too": lambda *case: True,
    },
    shapes={
        "join the two parts that you return: torch.cat([...], dim=-1)": lambda r, *case: isinstance(r, list),
        "the result is longer than `received`: it must have one sum for each slot": lambda r, right, *case: (
            r.shape[-1] > right.shape[-1]
        ),
        "the result is shorter than `received`: it must have one sum for each slot": lambda r, right, *case: (
            r.shape[-1] < right.shape[-1]
        ),
    },
)

# 3. Decide: which method for which task.

design = Choice(
    "design",
    "b",
    {
        "a": "nine tenths of 60,000 tokens must go, and you learn which detail is asked for only after they have gone. H2O answered 1 of 12 such questions above",
        "b": "6,000 tokens hold the last 3,000 twice over, however long the day becomes. The morning's words may go, the text stays fluent, and the memory never grows",
        "c": "6,000 of 120,000 tokens are one page in twenty. The sinks hold four tokens, not the contract, so the clause that you are asked for is gone",
        "d": "5,500 tokens fit into the room for 6,000, so there is nothing to evict. Exact copying needs every token, since any of them may be the next one",
    },
)
