# ruff: noqa: E501 (a sentence is one line)
"""Chapter 2: the KV cache."""

import torch

from course.teaching.check.answer import same, same_shape, weights_of
from course.teaching.check.draw import whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. A step with a cache: prefill and decode are the same few lines.


def _later(new, total):
    """What each of the `new` last tokens may not look at yet, `[new, total]`."""
    return torch.ones(new, total).triu(total - new + 1).bool()


def _steps(draw):
    def made(held, new, heads, kv_heads, d=16):
        shapes = (heads, new), (kv_heads, new), (kv_heads, new), (kv_heads, held), (kv_heads, held)
        return tuple(torch.randn(*shape, d, generator=draw) * 0.4 for shape in shapes)

    return [
        made(whole(draw, 5, 7), 1, 1, 1),
        made(0, 1, 1, 1),
        made(whole(draw, 3, 5), 1, 3, 3, d=8),
        made(0, whole(draw, 5, 7), 2, 2),
        made(whole(draw, 4, 6), 3, 2, 2),
        made(whole(draw, 22, 26), 3, 6, 2, d=32),
    ]


def _held(r, right, *case):
    """Whether K and V are right."""
    return same(r[1], right[1]) and same(r[2], right[2])


def _seen(r, right, places=None):
    """The weights that the output gives to the values `[heads, new, held + new]`, or which are not 0 of those at
    `places` `[new, held + new]`."""
    weights = weights_of(r[0], right[2].repeat_interleave(len(r[0]) // len(right[2]), 0))
    return weights if places is None else weights[:, places(*weights.shape[1:])].abs() > 1e-6


attend_step = Exercise(
    "attend_step",
    RIGHT["attend_step"],
    _steps,
    MISTAKES["attend_step"],
    "prefill and decode are the same lines: what is held, what is new, and which token sees which",
    grows=(
        "a decode step with one head",
        "the first token of all, when nothing is held",
        "several heads",
        "a prompt of several tokens, none of which looks ahead",
        "three new tokens after those that are held",
        "query heads that share a KV head, and a longer text",
    ),
    signs={
        "the output has 16 bits: keep the type of the values": lambda r, *case: r[0].element_size() < 4,
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
        "K and V are right; the output of a head is no weighted sum of the values of its KV head": _held,
    },
    shapes={
        "return three things: the output, K and V": lambda r, right, *case: len(r) != 3,
        "K and V are right; the output must have a row for each new token in each head: [heads, new, d]": _held,
        "K and V must be longer by the new tokens: [kv_heads, held + new, d]": lambda r, right, *case: (
            not same_shape(r[1], right[1]) and not same_shape(r[2], right[2])
        ),
    },
)

# 2. The planted bug: the position of the new token.


def _as_found(held, new):
    begin = max(held - 1, 0)  # behind the last token that is held
    return torch.arange(begin, begin + new)


def _counts(draw):
    held = whole(draw, 5, 30)
    return [(0, whole(draw, 3, 9)), (held, 1), (held + 1, 1), (held + 2, whole(draw, 2, 9)), (held + 300, 3)]


next_position = Exercise(
    "next_position",
    RIGHT["next_position"],
    _counts,
    MISTAKES["next_position"],
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
