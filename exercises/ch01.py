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

# 2. The published decode formula, repaired.


def _decode_flops(b, held, h, l, V):
    return l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V


def _published(b, held, h, l, V):
    return l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V * h


def _flop_cases():
    return [(1, 17, 32, 2, 96), (3, 100, 64, 4, 211), (2, 1, 16, 1, 50)]


decode_flops = Exercise(
    "decode_flops",
    _decode_flops,
    _flop_cases,
    {
        "12h² numbers are the weights of a layer, and each is multiplied and added: 24bh², not 12": (
            lambda b, held, h, l, V: l * (12 * b * h**2 + 4 * b * held * h) + 2 * b * h * V
        ),
        "the brackets after l are missing: every layer has both terms, not the first one alone": (
            lambda b, held, h, l, V: l * 24 * b * h**2 + 4 * b * held * h + 2 * b * h * V
        ),
        "the brackets after l end too late or are missing: the logits come once, the rest in every layer": (
            lambda b, held, h, l, V: 24 * b * h**2 + l * 4 * b * held * h + 2 * b * h * V
        ),
        "the attention term has lost its factor h: each of the held keys has h numbers": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V
        ),
        "the logits term has a factor h too many: [b, 1, h] x [h, V] costs 2bhV": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V * h
        ),
        "both are still wrong: the attention term lacks a factor h and the logits term has one too many": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held) + 2 * b * h * V * h
        ),
        "you counted the logits once for each layer; they are computed once, after the last": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h + 2 * b * h * V)
        ),
        "that is the cost of feeding all tokens again; a decode step feeds one": (
            lambda b, held, h, l, V: l * (24 * b * held * h**2 + 4 * b * held**2 * h) + 2 * b * held * h * V
        ),
        "held counts the new token already: do not take it away": (
            lambda b, held, h, l, V: _decode_flops(b, held - 1, h, l, V)
        ),
        "the layers are missing: every layer has its products, the logits come once": (
            lambda b, held, h, l, V: 24 * b * h**2 + 4 * b * held * h + 2 * b * h * V
        ),
        "the batch is missing: every row costs as much again": (
            lambda b, held, h, l, V: _decode_flops(1, held, h, l, V)
        ),
        "the logits are missing: [b, 1, h] x [h, V] costs 2bhV": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held * h)
        ),
        "you counted queries with keys and forgot weights with values (or the other way): 2bh·held each": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 2 * b * held * h) + 2 * b * h * V
        ),
        "you counted multiply-adds as one operation; the counter counts two": (
            lambda b, held, h, l, V: _decode_flops(b, held, h, l, V) / 2
        ),
        "held counts the new token already: do not add one more (nor the 4bh of the first document)": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * h + 4 * b * held * h) + 2 * b * h * V
        ),
        "h is an axis of 24bh² twice: [b, 1, h] x [h, h] costs 2bh², not 2bh": (
            lambda b, held, h, l, V: l * (24 * b * h + 4 * b * held * h) + 2 * b * h * V
        ),
        "the attention term grows with held, not with its square: one query is fed, not held of them": (
            lambda b, held, h, l, V: l * (24 * b * h**2 + 4 * b * held**2 * h) + 2 * b * h * V
        ),
    },
    "this is what the counter counts",
    given=_published,
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
