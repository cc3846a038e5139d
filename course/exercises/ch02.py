# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 2: the KV cache."""

import torch

from course.teaching.check.answer import same
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


def _steps():
    draw = torch.Generator().manual_seed(22)

    def made(held, new, heads, kv_heads, d=8):
        shapes = (heads, new), (kv_heads, new), (kv_heads, new), (kv_heads, held), (kv_heads, held)
        return tuple(torch.randn(*shape, d, generator=draw) for shape in shapes)

    return [
        made(5, 1, 1, 1),
        made(0, 1, 1, 1),
        made(4, 1, 3, 3),
        made(0, 6, 2, 2),
        made(5, 3, 2, 2),
        made(4, 3, 6, 2),
    ]


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
        "only the new keys and values are returned: the past is lost": _step_with(
            remember=lambda past, made: made[:, past.shape[1] :]
        ),
        "the new token looks at the cache alone: it looks at itself, too": (
            lambda q, k, v, K, V: (
                (q @ K.repeat_interleave(len(q) // len(k), 0).mT * K.shape[-1] ** -0.5).softmax(-1)
                @ V.repeat_interleave(len(q) // len(k), 0),
                torch.cat([K, k], 1),
                torch.cat([V, v], 1),
            )
        ),
        "the tokens of a prompt look at later ones: the mask is missing": _step_with(
            later=lambda new, total: torch.zeros(new, total).bool()
        ),
        "the mask forgets that tokens are held already: token i of the new ones is token held + i": _step_with(
            later=lambda new, total: torch.ones(new, total).triu(1).bool()
        ),
        "the mask is one off: each new token looks at the one after it": _step_with(
            later=lambda new, total: torch.ones(new, total).triu(total - new + 2).bool()
        ),
        "query heads that share a KV head are neighbours: repeat_interleave, not repeat": _step_with(
            share=lambda kept, times: kept.repeat(times, 1, 1)
        ),
        "only the first KV head is used: every group of query heads has its own": _step_with(
            share=lambda kept, times: kept[:1].expand(times * len(kept), -1, -1)
        ),
        "the scores are not divided by the root of d": _step_with(scale=lambda d: 1.0),
        "the scores are divided by d; divide by its root": _step_with(scale=lambda d: 1 / d),
        "the softmax runs over the queries; it runs over the keys (dim=-1)": _step_with(over=1),
        "the weights are applied to the keys; they belong to the values": _step_with(
            weigh=lambda weights, values, keys: weights @ keys
        ),
        "the output alone is returned; the next step needs K and V, too": _step_with(
            give=lambda out, K, V, q: out
        ),
        "K and V are exchanged in what you return: out, K, V": _step_with(
            give=lambda out, K, V, q: (out, V, K)
        ),
        "the output comes first: out, K, V": _step_with(give=lambda out, K, V, q: (K, V, out)),
        "keys repeated for every query head are returned: a cache holds KV heads only": _step_with(
            give=lambda out, K, V, q: (
                out,
                K.repeat_interleave(len(q) // len(K), 0),
                V.repeat_interleave(len(q) // len(V), 0),
            )
        ),
        "queries are returned as well: nobody needs them again": _step_with(
            give=lambda out, K, V, q: (out, q, K, V)
        ),
        "the oldest tokens leave when new ones come: a cache grows": _step_with(
            remember=lambda past, made: made[:, made.shape[1] - max(past.shape[1], 1) :]
        ),
    },
    "prefill and decode are the same lines: what is held, what is new, and who may look at whom",
    grows=(
        "a decode step with one head",
        "the first token of all, when nothing is held",
        "several heads",
        "a prompt of six tokens, of which none looks ahead",
        "three more tokens behind five that are held",
        "query heads that share a KV head",
    ),
    signs={
        "something is NaN: is a whole row of scores masked?": lambda r, *case: any(
            torch.as_tensor(part).isnan().any() for part in r
        ),
        "K must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, q, k, v, K, V: (
            tuple(r[1].shape) != (K.shape[0], K.shape[1] + k.shape[1], K.shape[2])
        ),
        "V must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, q, k, v, K, V: (
            tuple(r[2].shape) != (V.shape[0], V.shape[1] + v.shape[1], V.shape[2])
        ),
        "the output has one vector for each new token and query head: [heads, new, d]": lambda r, q, *case: (
            r[0].shape != q.shape
        ),
        "K and V are right; the output is not": lambda r, *case: all(
            same(a, b) for a, b in zip(r[1:], _step(*case)[1:], strict=True)
        ),
    },
)

# 2. The planted bug: the position of the new token.


def _next_position(held, new):
    return torch.arange(held, held + new)


def _as_found(held, new):
    begin = max(held - 1, 0)  # behind the last token that is held
    return torch.arange(begin, begin + new)


next_position = Exercise(
    "next_position",
    _next_position,
    lambda: [(0, 6), (6, 1), (7, 1), (10, 3)],
    {
        "the position does not advance: every new token says it stands at 0": lambda held, new: torch.arange(
            new
        ),
        "the last token that is held and the first new one say that they stand at the same place": (
            lambda held, new: _as_found(held, new)
        ),
        "off by one: with 6 tokens held (0 to 5), the next one stands at 6": (
            lambda held, new: torch.arange(held, held + new) - 1
        ),
        "off by one: with 6 tokens held (0 to 5), the next one stands at 6, not 7": (
            lambda held, new: torch.arange(held, held + new) + 1
        ),
        "those are the positions of all tokens; only the new ones are fed": lambda held, new: torch.arange(
            held + new
        ),
        "one position for all new tokens: each stands one further than the one before": (
            lambda held, new: torch.full((new,), held)
        ),
        "one token too many: range and arange stop before their end": (
            lambda held, new: torch.arange(held, held + new + 1)
        ),
        "the arguments of arange are begin and end, not begin and length": (
            lambda held, new: torch.arange(held, new)
        ),
        "those are the positions of the tokens in the cache; the new ones stand after them": (
            lambda held, new: torch.arange(held)
        ),
        "that is the number of tokens, not the positions of the new ones": lambda held, new: held + new,
        "the order is turned around: the first of the new tokens stands at `held`": (
            lambda held, new: torch.arange(held, held + new).flip(0)
        ),
        "those are the two ends; every new token from the first to the last needs its position": (
            lambda held, new: (held, held + new)
        ),
        "that is one position; every new token needs its own": lambda held, new: held,
        "every position is `new` too far: the first new token stands at `held`": (
            lambda held, new: torch.arange(held + new, held + 2 * new)
        ),
    },
    "a token's position is the number of tokens before it",
    holds="indices",
    given=_as_found,
)


# 3. Decide: does it fit?

fits = Choice(
    "fits",
    "c",
    {
        "a": "2 x 40 x 10 x 128 x 2 bytes are 204,800 a token; 32 texts of 8,192 tokens make 53.7 GB of it, more "
        "than twice what is there",
        "b": "half of 53.7 GB are 26.8 GB, and 24 are there: it fails by a hair, as it would if you had counted in "
        "GiB and believed 25.0",
        "c": "a quarter of 53.7 GB are 13.4 GB, and they fit with room for scales; 14 texts at 16 bits fit as well, "
        "but the customer wants 32, so the bits must give, and chapter 4 shows what that costs",
        "d": "GQA is in the figure already: the 10 are KV heads; with all 40 query heads it would be four times as "
        "much, and a trained model's heads cannot be shared afterwards",
    },
)
