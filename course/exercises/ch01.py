# ruff: noqa: E501 (a sentence is one line)
"""Chapter 1: recompute."""

import torch

from course.teaching.check.answer import same
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. The loop.

WORDS = 29  # of the small vocabulary below


def _model(draw):
    """A causal model in a few lines: its logits `[batch, tokens, vocabulary]` depend on the whole text so far."""
    phase = torch.rand(WORDS, generator=draw) * 6

    def model(ids):
        place = torch.arange(1, ids.shape[1] + 1)
        seen = ((ids + 3) * (place**2 % 7 + 1)).cumsum(1).double()  # [batch, tokens]
        return 9 * torch.sin(seen[..., None] * torch.arange(1, WORDS + 1) * 0.37 + phase)

    return model


def _texts(draw):
    model = _model(draw)
    for _ in range(1000):  # a text after which token 0 does not come: an index of rows would be right
        one = torch.randint(WORDS, (1, 3), generator=draw)
        if RIGHT["generate"](model, one, 1, -1)[0, 3]:
            break
    for _ in range(1000):
        three = torch.randint(WORDS, (3, 4), generator=draw)
        free = RIGHT["generate"](model, three, 8, -1)  # what is written when nothing ends it
        first, written = three[1].tolist(), free[0, 4:].tolist()
        others = {*three[0].tolist(), *three[2].tolist(), *free[1, 4:].tolist()}
        ends = {*first} & {*written[1:3]} - others
        if len(set(written)) == 8 and len(ends) == 1:
            break  # the first row ends with a token that was in the second row's prompt, which never writes it
    (end,) = ends
    for _ in range(1000):  # a text that repeats a token, and is longer than all others
        start = torch.randint(WORDS, (1, 3), generator=draw)
        long = RIGHT["generate"](model, start, 40, -1)[0]
        if (long[3:-1] == long[4:]).any():
            break
    return [
        (model, one, 1, -1),
        (model, one, 6, -1),
        (model, three, 5, -1),
        (model, three, 8, end),
        (model, three[[0, 0]], 8, written[3]),
        (model, three, 8, written[6]),
        (model, start, 40, -1),
    ]


def _stops_early(r, right, model, ids, new, end):
    """Whether rows get `end` where they should get another token, and all of these held it in their text."""
    many = min(r.shape[1], right.shape[1])
    early = ((r[:, :many] == end) & (right[:, :many] != end)).any(1)
    return early.any() and not early[~(ids == end).any(1)].any()


_WRITTEN = {
    "only the new tokens are returned: return the text with them": lambda r, right, model, ids, *case: (
        r.dim() == 2 and same(r, right[:, ids.shape[1] :])
    ),
    "the text has changed: what you return begins with it": lambda r, right, model, ids, *case: (
        not same(r[:, : ids.shape[1]], ids)
    ),
    "a row whose text holds `end` ends too early: only an `end` that was written finishes it": _stops_early,
    "the first new token is not the most likely one": lambda r, right, model, ids, *case: (
        not same(r[:, ids.shape[1]], right[:, ids.shape[1]])
    ),
    "a row that has ended gets other tokens than `end`": lambda r, right, model, ids, new, end: (
        (right[:, :-1] == end) & (right[:, 1:] == end) & (r[:, 1:] != end)
    )[:, ids.shape[1] :].any(),
    "the first new token is right, and a later one is not": lambda r, right, *case: r.shape == right.shape,
}


generate = Exercise(
    "generate",
    RIGHT["generate"],
    _texts,
    MISTAKES["generate"],
    "the whole text again for every token, until every row has ended",
    holds="indices",
    grows=(
        "one new token",
        "several, each from the longer text",
        "several rows",
        "a row that ends before the others",
        "all rows have ended",
        "another end",
        "a longer text",
    ),
    signs=_WRITTEN,
    shapes=_WRITTEN,
)

# 2. The planted bug: a mask for padded rows that hides the beginning of a text as it grows.


def _fading(lengths, total):
    return torch.arange(total) >= (total - lengths)[:, None]


def _rows(draw):
    lengths = torch.tensor(shuffled(draw, [2, 4, 4, whole(draw, 5, 7)]))
    one, longest = torch.tensor([whole(draw, 3, 6)]), int(lengths.max())
    return [
        (lengths, longest),
        (lengths, longest + whole(draw, 2, 5)),
        (one, int(one) + whole(draw, 2, 4)),
        (lengths[1:].sort().values, longest + whole(draw, 6, 9)),
    ]


visible = Exercise(
    "visible",
    RIGHT["visible"],
    _rows,
    MISTAKES["visible"],
    "each row sees one more token at each step, and never its padding",
    holds="booleans",
    given=_fading,
    signs={
        "padding is visible, and tokens of a text are hidden": lambda r, right, *case: (
            (r & ~right).any() and (~r & right).any()
        ),
        "a row sees a slot of its padding": lambda r, right, *case: (r & ~right).any(),
        "a row does not see its newest token": lambda r, right, *case: not r[:, -1].all(),
        "a row does not see the first token of its text": lambda r, right, *case: (
            not r.gather(1, right.byte().argmax(1, keepdim=True)).all()
        ),
        "a row does not see all tokens of its text": lambda r, right, *case: (~r & right).any(),
    },
    shapes={
        "the mask must have two dimensions: [batch, total]": lambda r, *case: r.dim() != 2,
    },
)

# 3. Decide: what to do about the growth.

growth = Choice(
    "growth",
    "c",
    {
        "a": "2,000 tokens after a prompt of 100 feed 2,199,000. That is 12.6 times today's 174,750 and takes 755 s, and a tenth is still 75 s. A faster machine divides a square, and it stays a square",
        "b": "64 x 2,000 = 128,000 tokens take 44 s, which is still too long. The text before the window is lost, so the answers change",
        "c": "keys and values of earlier tokens never change, so each token is fed once: 2,099 tokens instead of 2,199,000, or about 0.7 s by this measure. Chapter 2 keeps them",
        "d": "earlier logits are never used again: if you keep them, all 2,199,000 tokens must still be fed, in 755 s",
    },
)
