# ruff: noqa: E501 (a sentence is one line)
"""Chapter 5: eviction."""

import torch

from course.teaching.check.answer import same, same_rows
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. SnapKV: the end of the prompt chooses.


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
        made(1, 20, 8, 1, 7), made(1, 20, 8, 4, 9), made(3, 24, 8, 4, 10), made(2, 30, 16, 8, 12), made(4, 40, 8, 6, 7),
        made(2, 16, 8, 4, 4),
    ]  # fmt: skip


snapkv = Exercise(
    "snapkv",
    RIGHT["snapkv"],
    _prompts,
    MISTAKES["snapkv"],
    "the last queries choose, each head for itself, and the window always stays",
    alike=same_rows,
    holds="indices",
    grows=(
        "one head, a window of one query",
        "a window of several queries, none of which looks ahead",
        "several heads, each with tokens of its own",
        "a longer window",
        "a budget of the window and one more",
        "a budget of the window alone",
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
        "each head keeps `budget` tokens: [heads, budget]": lambda *case: True,
    },
)

# 2. The planted bug: sums that do not add up.


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
    RIGHT["add_up"],
    _passes,
    MISTAKES["add_up"],
    "each query gives away a weight of 1, and none of it is lost now",
    given=_frozen,
    signs={
        "at first the sum of a slot is what it received": lambda r, right, so_far, *case: so_far is None,
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
    },
    shapes={
        "join the two parts that you return: torch.cat([...], dim=-1)": lambda r, *case: isinstance(r, list),
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
