# ruff: noqa: E501 (a sentence is one line)
"""Chapter 1: recompute."""

import torch

from course.teaching.check.answer import same
from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

# 1. The loop.

WORDS = 29  # of the small vocabulary below


def _model(draw):
    """A causal model in a few lines: its logits `[batch, tokens, vocabulary]` depend on the whole text so far."""
    phase = torch.rand(WORDS, generator=draw) * 6

    def model(ids):
        place = torch.arange(1, ids.shape[1] + 1)
        seen = ((ids + 3) * (place**2 % 7 + 1)).cumsum(1).double()  # [batch, tokens]
        return torch.sin(seen[..., None] * torch.arange(1, WORDS + 1) * 0.37 + phase)

    return model


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


def _texts(draw):
    model = _model(draw)
    one = torch.randint(WORDS, (1, 3), generator=draw)
    for _ in range(1000):
        three = torch.randint(WORDS, (3, 4), generator=draw)
        free = _generate(model, three, 8, -1)  # what is written when nothing ends it
        first, written = three[1].tolist(), free[0, 4:].tolist()
        ends = {*first} & {*written[1:3]} - {*three[0].tolist(), *three[2].tolist()}
        if len(set(written)) == 8 and len(ends) == 1:
            break  # the first row ends with a token that was in the second row's prompt
    (end,) = ends
    return [
        (model, one, 1, -1),
        (model, one, 6, -1),
        (model, three, 5, -1),
        (model, three, 8, end),
        (model, three[[0, 0]], 8, written[3]),
        (model, three, 8, written[6]),
    ]


def _forgets(model, ids, new, end):
    """The text that is fed never grows."""
    return torch.cat([ids, model(ids)[:, -1].argmax(-1)[:, None].expand(-1, new)], dim=1)


def _all_at_once(model, ids, new, end):
    return torch.cat([ids, model(ids)[:, -new:].argmax(-1)], dim=1)


def _stops_early(r, right, model, ids, new, end):
    """Whether a row whose text held `end` gets `end` where it should get another token."""
    many = min(r.shape[1], right.shape[1])
    early = (r[:, :many] == end) & (right[:, :many] != end)
    return early[(ids == end).any(1), ids.shape[1] :].any()


_WRITTEN = {
    "only the new tokens are returned: return the text with them": lambda r, right, model, ids, *case: same(
        r, right[:, ids.shape[1] :]
    ),
    "the text has changed: what you return begins with it": lambda r, right, model, ids, *case: (
        not same(r[:, : ids.shape[1]], ids)
    ),
    "a row whose text holds `end` counts as finished: only an `end` that was written finishes it": _stops_early,
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
    _generate,
    _texts,
    {
        "you read the first position; the next token is predicted at the last": _loop(
            lambda x: x[:, 0].argmax(-1)
        ),
        "that is the least likely token: greedy takes the largest logit": _loop(
            lambda x: x[:, -1].argmin(-1)
        ),
        "you read the position before the last, which has not read the newest token": _loop(
            lambda x: x[:, -2].argmax(-1)
        ),
        "the mean over all positions is no prediction: take the last position alone": _loop(
            lambda x: x.mean(1).argmax(-1)
        ),
        "you append the largest logit itself: append its index (argmax)": _loop(
            lambda x: x[:, -1].amax(-1).long()
        ),
        "you take the largest logit of any position: only the last position predicts the next token": _loop(
            lambda x: x.amax(1).argmax(-1)
        ),
        "every row gets the token of row 0: each row has a next token of its own": _loop(
            lambda x: x[:, -1].argmax(-1)[:1].expand(len(x))
        ),
        "only the newest token is fed, and there is no cache: the model does not see the text before it": _loop(
            fed=lambda ids: ids[:, -1:]
        ),
        "the text that you feed never grows: join the new token to it before the next step": _forgets,
        "one pass cannot write several tokens: each depends on the one before": _all_at_once,
        "the new token comes before the text: join it at the end": _loop(
            join=lambda ids, newest: torch.cat([newest[:, None], ids], dim=1)
        ),
        "the oldest token leaves when a new one comes: feed the whole text": _loop(
            join=lambda ids, newest: torch.cat([ids[:, 1:], newest[:, None]], dim=1)
        ),
        "one token too many: count the passes of your loop": _loop(steps=lambda new: new + 1),
        "one token too few: count the passes of your loop": _loop(steps=lambda new: new - 1),
        "only the new tokens are returned: return the text with them": (
            lambda model, ids, new, end: _generate(model, ids, new, end)[:, ids.shape[1] :]
        ),
        "only the last token is returned: return the whole text": (
            lambda model, ids, new, end: _generate(model, ids, new, end)[:, -1]
        ),
        "a row that has ended gets other tokens than `end`": _loop(ends=False),
        "the loop stops when one row has ended, and the others are not finished": _loop(
            stops=lambda done: bool(done.any())
        ),
        "the loop goes on when all rows have ended: stop there": _loop(stops=lambda done: False),
        "a row that has ended gets zeros: append `end` to it": _loop(filled=lambda end: 0),
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
    signs=_WRITTEN,
    shapes=_WRITTEN
    | {
        "the loop writes fewer tokens than it should": lambda r, right, *case: (
            len(r) == len(right) and r.shape[-1] < right.shape[-1]
        ),
        "the loop writes more tokens than it should": lambda r, right, *case: (
            len(r) == len(right) and r.shape[-1] > right.shape[-1]
        ),
    },
)

# 2. The planted bug: a mask for padded rows that hides the beginning of a text as it grows.


def _padding(lengths):
    """Padding before each text, `[batch, 1]`: the longest one has none."""
    return (lengths.max() - lengths)[:, None]


def _visible(lengths, total):
    return torch.arange(total) >= _padding(lengths)


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
    _visible,
    _rows,
    {
        "a row sees as many tokens as its prompt had, so for each new one its oldest goes: `total` grows": (
            lambda lengths, total: _fading(lengths, total)
        ),
        "the padding is visible: hide it in every row that is shorter than the longest": (
            lambda lengths, total: torch.ones(len(lengths), total).bool()
        ),
        "the padding is on the left, and you hide slots on the right": (
            lambda lengths, total: torch.arange(total) < lengths[:, None]
        ),
        "the mask is turned around: True is what a row sees": (
            lambda lengths, total: torch.arange(total) < _padding(lengths)
        ),
        "off by one: the first token of each text is hidden, too": (
            lambda lengths, total: torch.arange(total) > _padding(lengths)
        ),
        "off by one: the last slot of the padding is visible": (
            lambda lengths, total: torch.arange(total) >= _padding(lengths) - 1
        ),
        "every row has the same mask: each needs padding of its own": (
            lambda lengths, total: (torch.arange(total) >= lengths.max() - lengths.min()).expand(
                len(lengths), total
            )
        ),
        "the padding grows with every new token: it is as long as at the first step": (
            lambda lengths, total: (torch.arange(total) >= total - lengths.max()).expand(len(lengths), total)
        ),
        "the prompt is hidden, and only what was written is visible": (
            lambda lengths, total: (torch.arange(total) >= lengths.max()).expand(len(lengths), total)
        ),
        "what was written is hidden: it is a part of the text now": (
            lambda lengths, total: _visible(lengths, total) & (torch.arange(total) < lengths.max())
        ),
        "that is how many tokens a row sees: say which ones, in a mask [batch, total]": (
            lambda lengths, total: total - _padding(lengths)[:, 0]
        ),
        "rows and columns are exchanged: the mask is [batch, total]": (
            lambda lengths, total: _visible(lengths, total).T.contiguous()
        ),
        "0 and minus infinity are for scores: return True and False": (
            lambda lengths, total: torch.where(_visible(lengths, total), 0.0, -torch.inf)
        ),
    },
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
        "the mask must have one row for each text: [batch, total]": lambda r, right, *case: (
            r.dim() < 2 or len(r) != len(right)
        ),
        "the mask must have `total` columns: [batch, total]": lambda *case: True,
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
