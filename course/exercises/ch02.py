# ruff: noqa: E501 (a sentence is one line)
"""Chapter 2: the KV cache."""

import torch

from course.teaching.check.answer import same, same_shape, weights_of
from course.teaching.check.draw import whole
from course.teaching.check.exercise import Choice, Exercise

# 1. A step with a cache: prefill and decode are the same few lines.


def _later(new, total):
    """What each of the `new` last tokens may not look at yet, `[new, total]`."""
    return torch.ones(new, total).triu(total - new + 1).bool()


def _step_with(
    join=lambda past, now: torch.cat([past, now], dim=1),
    later=_later,
    share=lambda kept, times: kept.repeat_interleave(times, 0),
    scale=lambda d: d**-0.5,
    over=-1,
    weigh=lambda weights, values, keys: weights @ values,
    give=lambda out, K, V, q: (out, K, V),
    remember=lambda past, made: made,
):
    """The step with one of its parts exchanged."""

    def step(q, k, v, K, V):
        old = K, V
        K, V = join(K, k), join(V, v)  # [kv_heads, held + new, d]
        keys, values = share(K, len(q) // len(k)), share(V, len(q) // len(k))  # [heads, held + new, d]
        scores = q @ keys.mT * scale(q.shape[-1])  # [heads, new, held + new]
        weights = scores.masked_fill(later(*scores.shape[1:]), -torch.inf).softmax(over)
        return give(weigh(weights, values, keys), remember(old[0], K), remember(old[1], V), q)

    return step


_step = _step_with()


def _steps(draw):
    def made(held, new, heads, kv_heads, d=16):
        shapes = (heads, new), (kv_heads, new), (kv_heads, new), (kv_heads, held), (kv_heads, held)
        return tuple(torch.randn(*shape, d, generator=draw) * 0.4 for shape in shapes)

    return [
        made(whole(draw, 5, 7), 1, 1, 1),
        made(0, 1, 1, 1),
        made(whole(draw, 3, 5), 1, 3, 3),
        made(0, whole(draw, 5, 7), 2, 2),
        made(whole(draw, 4, 6), 3, 2, 2),
        made(whole(draw, 4, 6), 3, 6, 2),
    ]


def _held(r, right):
    """Whether K and V are right."""
    return same(r[1], right[1]) and same(r[2], right[2])


def _seen(r, right, places=None):
    """The weights that the output gives to the values `[heads, new, held + new]`, or which are not 0 of those at
    `places` `[new, held + new]`."""
    weights = weights_of(r[0], right[2].repeat_interleave(len(r[0]) // len(right[2]), 0))
    return weights if places is None else weights[:, places(*weights.shape[1:])].abs() > 1e-6


attend_step = Exercise(
    "attend_step",
    _step,
    _steps,
    {
        "the new keys come before the old ones: join them behind, so that tokens keep their order": _step_with(
            lambda past, now: torch.cat([now, past], dim=1)
        ),
        "the cache is returned as it came: it must grow by the new keys and values": _step_with(
            remember=lambda past, made: past
        ),
        "only the new keys and values are returned: return those of the past with them": _step_with(
            remember=lambda past, made: made[:, past.shape[1] :]
        ),
        "the new token attends to the cache alone: it attends to itself, too": (
            lambda q, k, v, K, V: (
                (q @ K.repeat_interleave(len(q) // len(k), 0).mT * K.shape[-1] ** -0.5).softmax(-1)
                @ V.repeat_interleave(len(q) // len(k), 0),
                torch.cat([K, k], 1),
                torch.cat([V, v], 1),
            )
        ),
        "the tokens of a prompt attend to later ones: the mask is missing": _step_with(
            later=lambda new, total: torch.zeros(new, total).bool()
        ),
        "the mask forgets the tokens that are held: the i-th new token has position held + i": _step_with(
            later=lambda new, total: torch.ones(new, total).triu(1).bool()
        ),
        "the mask is off by one: each new token attends to the one after it": _step_with(
            later=lambda new, total: torch.ones(new, total).triu(total - new + 2).bool()
        ),
        "query heads that share a KV head are neighbours: repeat_interleave, not repeat": _step_with(
            share=lambda kept, times: kept.repeat(times, 1, 1)
        ),
        "only the first KV head is used: every group of query heads has its own": _step_with(
            share=lambda kept, times: kept[:1].expand(times * len(kept), -1, -1)
        ),
        "the scores are not divided by the root of d": _step_with(scale=lambda d: 1.0),
        "the scores are divided by d: divide by its root": _step_with(scale=lambda d: 1 / d),
        "the scores are multiplied by the root of d: divide by it": _step_with(scale=lambda d: d**0.5),
        "the softmax runs over the queries: it must run over the keys (dim=-1)": _step_with(over=1),
        "the weights multiply the keys: they belong to the values": _step_with(
            weigh=lambda weights, values, keys: weights @ keys
        ),
        "the output alone is returned: the next step needs K and V, too": _step_with(
            give=lambda out, K, V, q: out
        ),
        "K and V are exchanged in what you return: the order is out, K, V": _step_with(
            give=lambda out, K, V, q: (out, V, K)
        ),
        "the output comes last in what you return: the order is out, K, V": _step_with(
            give=lambda out, K, V, q: (K, V, out)
        ),
        "the repeated keys and values are returned: a cache holds one for each KV head": _step_with(
            give=lambda out, K, V, q: (
                out,
                K.repeat_interleave(len(q) // len(K), 0),
                V.repeat_interleave(len(q) // len(V), 0),
            )
        ),
        "the queries are returned, too: no later step needs them": _step_with(
            give=lambda out, K, V, q: (out, q, K, V)
        ),
        "the oldest tokens leave when new ones come: a cache grows": _step_with(
            remember=lambda past, made: made[:, made.shape[1] - max(past.shape[1], 1) :]
        ),
    },
    "prefill and decode are the same lines: what is held, what is new, and which token sees which",
    grows=(
        "a decode step with one head",
        "the first token of all, when nothing is held",
        "several heads",
        "a prompt of several tokens, none of which looks ahead",
        "three new tokens after those that are held",
        "query heads that share a KV head",
    ),
    signs={
        "the output holds NaN: is a whole row of scores masked?": lambda r, *case: r[0].isnan().any(),
        "K and V are right; a new token attends to a later one": lambda r, right, *case: (
            _held(r, right) and _seen(r, right, _later).any()
        ),
        "K and V are right; the weights of a new token do not add up to 1": lambda r, right, *case: (
            _held(r, right) and not same(_seen(r, right).sum(-1), torch.ones(r[0].shape[:2]))
        ),
        "K and V are right; a new token does not attend to itself": lambda r, right, *case: (
            _held(r, right) and not _seen(r, right, lambda n, t: torch.eye(n, t).roll(t - n, 1).bool()).all()
        ),
        "K and V are right; a new token does not attend to everything up to itself": lambda r, right, *case: (
            _held(r, right) and not _seen(r, right, lambda n, t: ~_later(n, t)).all()
        ),
        "K and V are right, and each token attends to the right ones; their weights are wrong": lambda r, right, *case: (
            _held(r, right) and _seen(r, right) is not None
        ),
        "K and V are right; the output of a head is no weighted sum of the values of its KV head": lambda r, right, *case: (
            _held(r, right)
        ),
        "the output is right; K and V are not": lambda r, right, *case: (
            same(r[0], right[0]) and not same(r[1], right[1]) and not same(r[2], right[2])
        ),
        "K is right; V is not": lambda r, right, *case: same(r[1], right[1]) and not same(r[2], right[2]),
        "V is right; K is not": lambda r, right, *case: same(r[2], right[2]) and not same(r[1], right[1]),
        "neither K nor V is right": lambda r, right, *case: True,
    },
    shapes={
        "return three things: the output, K and V": lambda r, right, *case: len(r) != 3,
        "K and V must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, right, *case: (
            not same_shape(r[1], right[1]) and not same_shape(r[2], right[2])
        ),
        "K must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, right, *case: (
            not same_shape(r[1], right[1])
        ),
        "V must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, right, *case: (
            not same_shape(r[2], right[2])
        ),
        "the output holds one vector for each query head and new token: [heads, new, d]": lambda r, right, *case: (
            not same_shape(r[0], right[0])
        ),
    },
)

# 2. The planted bug: the position of the new token.


def _next_position(held, new):
    return torch.arange(held, held + new)


def _as_found(held, new):
    begin = max(held - 1, 0)  # behind the last token that is held
    return torch.arange(begin, begin + new)


def _counts(draw):
    held = whole(draw, 5, 30)
    return [(0, whole(draw, 3, 9)), (held, 1), (held + 1, 1), (held + 2, whole(draw, 2, 9))]


next_position = Exercise(
    "next_position",
    _next_position,
    _counts,
    {
        "the positions begin at 0: they begin at `held`": lambda held, new: torch.arange(new),
        "the first new token gets the position of the last one that is held": (
            lambda held, new: _as_found(held, new)
        ),
        "every position is too small by 1: with 6 tokens held (0 to 5), the next position is 6": (
            lambda held, new: torch.arange(held, held + new) - 1
        ),
        "every position is too large by 1: with 6 tokens held (0 to 5), the next position is 6": (
            lambda held, new: torch.arange(held, held + new) + 1
        ),
        "those are the positions of all tokens: only the new ones are fed": lambda held, new: torch.arange(
            held + new
        ),
        "all new tokens get the same position: each comes one after the token before it": (
            lambda held, new: torch.full((new,), held)
        ),
        "one position too many: range and arange stop before their end": (
            lambda held, new: torch.arange(held, held + new + 1)
        ),
        "the arguments of arange are begin and end, not begin and length": (
            lambda held, new: torch.arange(held, new)
        ),
        "those are the positions of the tokens in the cache: the new ones come after them": (
            lambda held, new: torch.arange(held)
        ),
        "that is the number of tokens, not the positions of the new ones": lambda held, new: held + new,
        "the order is reversed: the first of the new tokens has position `held`": (
            lambda held, new: torch.arange(held, held + new).flip(0)
        ),
        "those are the two ends: every new token needs its own position": (
            lambda held, new: (held, held + new)
        ),
        "that is one position: every new token needs its own": lambda held, new: held,
        "every position is too large by `new`: the first new token has position `held`": (
            lambda held, new: torch.arange(held + new, held + 2 * new)
        ),
    },
    "a token's position is the number of tokens before it",
    holds="indices",
    given=_as_found,
    signs={
        "two tokens get the same position": lambda r, right, *case: len(r.unique()) < len(r),
        "the first new token must get position `held`": lambda r, right, held, new: r[0] != held,
        "each new token must get the position after the one before it": lambda r, right, *case: (
            r.diff() != 1
        ).any(),
    },
    shapes={
        "return the positions in one dimension, as arange gives them": lambda r, *case: r.dim() != 1,
        "these are fewer positions than new tokens": lambda r, right, held, new: len(r) < new,
        "these are more positions than new tokens": lambda r, right, held, new: len(r) > new,
    },
)


# 3. Decide: does it fit?

fits = Choice(
    "fits",
    "c",
    {
        "a": "2 x 40 x 10 x 128 x 2 bytes are 204,800 per token. 32 texts of 8,192 tokens take 53.7 GB, more than twice the 24 GB that you have",
        "b": "half of 53.7 GB is 26.8 GB, and you have 24. It just misses, even if you count in GiB and get 25.0",
        "c": "a quarter of 53.7 GB is 13.4 GB, which fits with room for scales. 14 texts at 16 bits fit as well, but the customer wants 32, so the numbers must get smaller. Chapter 4 shows what that costs",
        "d": "GQA is in the figure already: the 10 are KV heads. With all 40 query heads the cache would be four times as large, and the heads of a trained model cannot be shared afterwards",
    },
)
