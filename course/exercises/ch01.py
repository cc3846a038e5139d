# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 1: recompute."""

import torch

from course.teaching.check.exercise import Choice, Exercise

# 1. The loop.

WORDS = 11  # of the small vocabulary below


def _scores(ids):
    """A causal model in one line: logits `[batch, tokens, vocabulary]` that depend on the whole text so far."""
    place = torch.arange(1, ids.shape[1] + 1)
    seen = ((ids + 3) * (place**2 % 7 + 1)).cumsum(1).double()  # [batch, tokens]
    return torch.sin(seen[..., None] * torch.arange(1, WORDS + 1) * 0.37)


def _loop(
    choose=lambda logits: logits[:, -1].argmax(-1),
    fed=lambda ids: ids,
    join=lambda ids, newest: torch.cat([ids, newest[:, None]], dim=1),
    steps=lambda new: new,
    filled=lambda end: end,
    stops=lambda done: bool(done.all()),
    ends=True,
):
    """The loop with one of its parts exchanged."""

    def generate(model, ids, new, end):
        done = torch.zeros(len(ids), dtype=torch.bool)
        for _ in range(steps(new)):
            newest = choose(model(fed(ids)))
            if ends:
                newest = torch.where(done, torch.full_like(newest, filled(end)), newest)
                done = done | (newest == end)
            ids = join(ids, newest)
            if ends and stops(done):
                break
        return ids

    return generate


_generate = _loop()


def _texts():
    one, three = torch.tensor([[2, 5, 1]]), torch.tensor([[2, 5, 1, 7], [3, 3, 0, 9], [8, 1, 6, 2]])
    free = _generate(_scores, three, 8, -1)  # what is written when nothing ends it
    longest = max(free[0, 4:].tolist(), key=lambda word: free[0, 4:].tolist().index(word))
    return [
        (_scores, one, 1, -1),
        (_scores, one, 6, -1),
        (_scores, three, 5, -1),
        (_scores, three, 8, int(free[0, 5])),
        (_scores, three[[0, 0]], 8, int(free[0, 6])),
        (_scores, three, 8, longest),
    ]


def _forgets(model, ids, new, end):
    """The text that is fed never grows."""
    return torch.cat([ids, model(ids)[:, -1].argmax(-1)[:, None].expand(-1, new)], dim=1)


def _all_at_once(model, ids, new, end):
    return torch.cat([ids, model(ids)[:, -new:].argmax(-1)], dim=1)


generate = Exercise(
    "generate",
    _generate,
    _texts,
    {
        "you read the first position; the next token is predicted at the last": _loop(
            lambda x: x[:, 0].argmax(-1)
        ),
        "that is the least likely token: greedy takes the largest logit": _loop(
            lambda x: x[:, -1].argmin(-1)
        ),
        "the position before the last has not read the newest token: take the last one": _loop(
            lambda x: x[:, -2].argmax(-1)
        ),
        "the mean over all positions is no prediction: take the last position alone": _loop(
            lambda x: x.mean(1).argmax(-1)
        ),
        "the largest logit of any position: only the last position predicts the next token": _loop(
            lambda x: x.amax(1).argmax(-1)
        ),
        "row 0's token goes to every row; each row has a next token of its own": _loop(
            lambda x: x[:, -1].argmax(-1)[:1].expand(len(x))
        ),
        "only the newest token is fed, and there is no cache: the model has forgotten the text before it": _loop(
            fed=lambda ids: ids[:, -1:]
        ),
        "the text that you feed never grows: join the new token to it before the next step": _forgets,
        "one pass cannot write several tokens: each depends on the one before": _all_at_once,
        "the new token stands before the text; it belongs behind it": _loop(
            join=lambda ids, newest: torch.cat([newest[:, None], ids], dim=1)
        ),
        "the oldest token leaves when a new one comes: without a cache the whole text is fed": _loop(
            join=lambda ids, newest: torch.cat([ids[:, 1:], newest[:, None]], dim=1)
        ),
        "one token too many: count the passes of your loop": _loop(steps=lambda new: new + 1),
        "one token too few: count the passes of your loop": _loop(steps=lambda new: new - 1),
        "only the new tokens are returned; asked for is the text with them": (
            lambda model, ids, new, end: _generate(model, ids, new, end)[:, ids.shape[1] :]
        ),
        "only the last token is returned; asked for is the whole text": (
            lambda model, ids, new, end: _generate(model, ids, new, end)[:, -1]
        ),
        "`end` is not looked at: a row that has written it goes on": _loop(ends=False),
        "the loop stops when one row has ended; the others still have something to say": _loop(
            stops=lambda done: bool(done.any())
        ),
        "all rows have ended, and the loop goes on feeding them": _loop(stops=lambda done: False),
        "a row that has ended is filled with zeros; fill it with `end`": _loop(filled=lambda end: 0),
    },
    "the whole text again for every token, until every row has ended",
    holds="indices",
    grows=(
        "one new token",
        "several, each from the longer text",
        "several rows",
        "a row that ends before the others",
        "all rows have ended",
        "another end",
    ),
)

# 2. The planted bug: a mask for padded rows that hides the beginning of a text as it grows.


def _padding(lengths):
    """Padding before each text, `[batch, 1]`: the longest one has none."""
    return (lengths.max() - lengths)[:, None]


def _visible(lengths, total):
    return torch.arange(total) >= _padding(lengths)


def _fading(lengths, total):
    return torch.arange(total) >= (total - lengths)[:, None]


def _rows():
    return [
        (torch.tensor([3, 6, 5]), 6),
        (torch.tensor([3, 6, 5]), 9),
        (torch.tensor([4]), 7),
        (torch.tensor([2, 7, 7, 1]), 12),
    ]


visible = Exercise(
    "visible",
    _visible,
    _rows,
    {
        "a row sees as many tokens as its prompt had, so for each new one its oldest goes: `total` grows": (
            lambda lengths, total: _fading(lengths, total)
        ),
        "the padding is visible: it says something to every row that is shorter": (
            lambda lengths, total: torch.ones(len(lengths), total).bool()
        ),
        "the padding stands on the left; you hide the right": (
            lambda lengths, total: torch.arange(total) < lengths[:, None]
        ),
        "the mask is turned around: True is what a row sees": (
            lambda lengths, total: torch.arange(total) < _padding(lengths)
        ),
        "one off: the first token of each text is hidden, too": (
            lambda lengths, total: torch.arange(total) > _padding(lengths)
        ),
        "one off: the last token of the padding is visible": (
            lambda lengths, total: torch.arange(total) >= _padding(lengths) - 1
        ),
        "one mask for all rows: each has padding of its own": (
            lambda lengths, total: (torch.arange(total) >= lengths.max() - lengths.min()).expand(
                len(lengths), total
            )
        ),
        "what was written is taken for padding: padding stands before the shorter texts, and does not grow": (
            lambda lengths, total: (torch.arange(total) >= total - lengths.max()).expand(len(lengths), total)
        ),
        "the prompt is hidden, and only what was written is visible": (
            lambda lengths, total: (torch.arange(total) >= lengths.max()).expand(len(lengths), total)
        ),
        "what was written is hidden: it is part of the text now": (
            lambda lengths, total: _visible(lengths, total) & (torch.arange(total) < lengths.max())
        ),
        "that is how many tokens a row sees; asked for is which": (
            lambda lengths, total: total - _padding(lengths)[:, 0]
        ),
        "rows and columns are exchanged: [batch, total]": (
            lambda lengths, total: _visible(lengths, total).T.contiguous()
        ),
        "0 and minus infinity are added to scores; here True and False are asked for": (
            lambda lengths, total: torch.where(_visible(lengths, total), 0.0, -torch.inf)
        ),
    },
    "each row sees one token more at each step, and never its padding",
    holds="booleans",
    given=_fading,
    signs={
        "a row must see one token more at each step, and its text from the first token on": (
            lambda r, lengths, total: (
                r.shape == (len(lengths), total) and (r.sum(-1) < total - _padding(lengths)[:, 0]).any()
            )
        ),
    },
)

# 3. Decide: what to do about the growth.

growth = Choice(
    "growth",
    "c",
    {
        "a": "2,000 tokens after a prompt of 100 feed 2,199,000, which is 12.6 times the 174,750 of today: 755 s, "
        "and a tenth of them is still 75 s; a faster machine divides a square, and it stays a square",
        "b": "64 x 2,000 = 128,000 tokens take 44 s, still too long, and what lies before the window is lost: "
        "the answers are others",
        "c": "keys and values of earlier tokens never change, so each token is fed once: 2,099 tokens in place of "
        "2,199,000, about 0.7 s by this measure; chapter 2 keeps them",
        "d": "earlier logits are not used again: keeping them leaves all 2,199,000 tokens to be fed, 755 s",
    },
)
