"""Chapter 5: eviction."""

import torch

from course.teaching.check.answer import same_members
from course.teaching.check.exercise import Choice, Exercise

# 1. Sinks: which slots stay.


def _sink_slots(tokens, sinks, budget):
    return list(range(sinks)) + list(range(tokens - (budget - sinks), tokens))


sink_slots = Exercise(
    "sink_slots",
    _sink_slots,
    lambda: [(20, 4, 10), (9, 1, 4), (30, 0, 5), (12, 3, 11), (8, 4, 4), (10, 2, 10)],
    {
        "you kept the sinks on top of the budget: together they are too many": (
            lambda t, s, b: list(range(s)) + list(range(t - b, t))
        ),
        "the newest token is gone: the window must end with the last slot": (
            lambda t, s, b: list(range(s)) + list(range(t - (b - s) - 1, t - 1))
        ),
        "you kept the tokens right after the sinks: the window is at the other end": (
            lambda t, s, b: list(range(b))
        ),
        "there are no sinks in what you keep: without the first tokens the model falls apart": (
            lambda t, s, b: list(range(t - b, t))
        ),
        "one slot too many in the window: count budget - sinks slots up to the newest": (
            lambda t, s, b: list(range(s)) + list(range(t - (b - s) - 1, t))
        ),
        "the window begins one slot late: it holds budget - sinks slots": (
            lambda t, s, b: list(range(s)) + list(range(t - (b - s) + 1, t))
        ),
        "slots start at 0: the newest is tokens - 1, and there is no slot `tokens`": (
            lambda t, s, b: list(range(s)) + list(range(t - (b - s) + 1, t + 1))
        ),
        "slots start at 0: the first sink is slot 0": (
            lambda t, s, b: list(range(1, s + 1)) + list(range(t - (b - s), t))
        ),
        "those are the slots that go; asked for are the ones that stay": (
            lambda t, s, b: list(range(s, t - (b - s)))
        ),
        "the window comes before the sinks: give the slots in order": (
            lambda t, s, b: list(range(t - (b - s), t)) + list(range(s))
        ),
        "the window runs backwards: give the slots in order": (
            lambda t, s, b: list(range(s)) + list(range(t - 1, t - (b - s) - 1, -1))
        ),
        "the sinks are missing, though their places are left free": lambda t, s, b: list(
            range(t - (b - s), t)
        ),
        "the window is missing: the newest tokens stay, too": lambda t, s, b: list(range(s)),
        "every token stays: the budget is not kept": lambda t, s, b: list(range(t)),
        "those are two lists, one in the other: join them with +": (
            lambda t, s, b: [list(range(s)), list(range(t - (b - s), t))]
        ),
        "that is a mask; asked for are the numbers of the slots": (
            lambda t, s, b: [i < s or i >= t - (b - s) for i in range(t)]
        ),
        "`sinks` is not used: four sinks are right only where `sinks` is 4": (
            lambda t, s, b: list(range(4)) + list(range(t - (b - 4), t))
        ),
        "`sinks` is not used for the first slots, only for the window: four are right only where it is 4": (
            lambda t, s, b: list(range(4)) + list(range(t - (b - s), t))
        ),
        "slots are counted from 0, to tokens - 1: each of yours is one too large": (
            lambda t, s, b: list(range(1, s + 1)) + list(range(t - (b - s) + 1, t + 1))
        ),
        "where `budget` equals `sinks` there is no window, but [-0:] is the whole list": (
            lambda t, s, b: list(range(t))[:s] + list(range(t))[-(b - s) :]
        ),
        "sinks and window are exchanged: `sinks` slots at the front, the rest of the budget at the end": (
            lambda t, s, b: list(range(b - s)) + list(range(t - s, t))
        ),
    },
    "the first tokens and the most recent ones, within the budget",
    holds="indices",
    signs={
        "you kept more slots than the budget allows": lambda r, t, s, b: len(r) > b,
        "you kept fewer slots than the budget allows": lambda r, t, s, b: len(r) < b,
        "the newest token is gone: the last slot is tokens - 1": lambda r, t, s, b: t - 1 not in r,
        "the sinks are not all there": lambda r, t, s, b: not set(range(s)) <= set(r.tolist()),
    },
)

# 2. H2O: find the bug in the eviction.


def _heavy_hitters(received, budget, recent):
    """The heavy slots outside the window and the window, in order."""
    received = torch.as_tensor(received, dtype=torch.float32)
    window = len(received) - recent
    heavy = received[:window].topk(budget - recent).indices.sort().values
    return heavy.tolist() + list(range(window, len(received)))


def _scores():
    generator = torch.Generator().manual_seed(5)
    return [
        ((torch.rand(size, generator=generator) * weight), budget, recent)
        for size, budget, recent, weight in (
            (12, 6, 3, torch.linspace(1.5, 0.1, 12)),
            (20, 8, 4, torch.linspace(0.2, 2, 20)),
            (9, 5, 2, torch.tensor([1.0] * 8 + [9.0])),
        )
    ] + [(torch.tensor([5.5, 0.1, 0.2, 4.5, 0.1, 0.3, 0.05]), 3, 2)]  # sums of many steps, larger than 1


def _lightest(received, budget, recent):
    window = len(received) - recent
    return received[:window].topk(budget - recent, largest=False).indices.sort().values.tolist() + list(
        range(window, len(received))
    )


def _no_window(received, budget, recent):
    return received.topk(budget).indices.sort().values.tolist()


def _as_found(received, budget, recent):
    window = len(received) - recent  # the first slot of the window
    heavy = received.topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _window_may_be_heavy(received, budget, recent):
    heavy = received.topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _newest_evicted(received, budget, recent):
    window = len(received) - recent - 1
    heavy = received[:window].topk(budget - recent).indices.sort().values
    return heavy.tolist() + list(range(window, len(received) - 1))


def _window_raised_by_one(received, budget, recent):
    raised = received.clone()
    raised[-recent:] += 1
    return sorted(raised.topk(budget).indices.tolist())


def _lightest_of_all(received, budget, recent):
    heavy = received.topk(budget - recent, largest=False).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _window_on_top(received, budget, recent):
    window = len(received) - recent
    heavy = received[:window].topk(min(budget, window)).indices
    return sorted(heavy.tolist()) + list(range(window, len(received)))


def _window_cut_too_early(received, budget, recent):
    window = len(received) - recent - 1
    heavy = received[:window].topk(budget - recent).indices
    return sorted(heavy.tolist()) + list(range(window + 1, len(received)))


def _latest(received, budget, recent):
    return list(range(len(received) - budget, len(received)))


def _evicted(received, budget, recent):
    return sorted(set(range(len(received))) - set(_heavy_hitters(received, budget, recent)))


def _scores_instead(received, budget, recent):
    return [received[slot].item() for slot in _heavy_hitters(received, budget, recent)]


def _indices_of_the_window(received, budget, recent):
    heavy = received[: len(received) - recent].topk(budget - recent).indices
    return sorted(heavy.tolist()) + list(range(recent))


def _heavy_in_the_window(received, budget, recent):
    window = len(received) - recent
    heavy = received[-recent:].topk(min(budget - recent, recent)).indices + window
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _heavy_in_the_window_only(received, budget, recent):
    window = len(received) - recent
    heavy = received[window:].topk(budget - recent).indices + window
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _numbered_from_the_window(received, budget, recent):
    window = len(received) - recent
    heavy = received[window:].topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(window, len(received))))


def _first_cut_off(received, budget, recent):
    heavy = received[recent:].topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _oldest_kept(received, budget, recent):
    return list(range(budget - recent)) + list(range(len(received) - recent, len(received)))


heavy_hitters = Exercise(
    "heavy_hitters",
    _heavy_hitters,
    _scores,
    {
        "you kept the tokens with the least attention: those are to go": _lightest,
        "the recent window is missing: a new token has received little attention and would go at once": (
            _no_window
        ),
        "recent tokens took places of heavy ones: choose the heavy ones outside the window": (
            _window_may_be_heavy
        ),
        "the newest token is evicted: the window must end with the last slot": _newest_evicted,
        "received is a sum and may be larger than 1: what lifts the window must be more than all of it": (
            _window_raised_by_one
        ),
        "you kept the tokens with the least attention, and chose them in the window, too": _lightest_of_all,
        "budget heavy ones and the window on top: the window is part of the budget": _window_on_top,
        "the token just before the window can never stay: the part before it ends at `window`": (
            _window_cut_too_early
        ),
        "only the window is left: that is a sliding window, nothing heavy stays": _latest,
        "those are the slots that go; asked for are the ones that stay": _evicted,
        "those are the scores; asked for are the numbers of the slots": _scores_instead,
        "the window stands at the front: its slots are the last `recent` ones": _indices_of_the_window,
        "the heavy ones are looked for inside the window, where all stay anyway": _heavy_in_the_window,
        "the heavy ones are looked for inside the window, where all stay anyway; it may also be too short": (
            _heavy_in_the_window_only
        ),
        "received[window:] is the window itself, where all stay anyway: cut off what follows, [:window]": (
            _numbered_from_the_window
        ),
        "received[recent:] lacks the first slots, and counts from there: the window stands at the end": (
            _first_cut_off
        ),
        "the first slots stay, whatever they received: those are sinks, not heavy hitters": _oldest_kept,
    },
    "heavy ones and recent ones, each within its share of the budget",
    alike=same_members,
    holds="indices",
    given=_as_found,
    signs={
        "too few different slots: choose the heavy ones outside the window": lambda r, x, b, n: (
            len(set(r.tolist())) < b
        ),
        "more slots than the budget allows": lambda r, x, b, n: len(r) > b,
        "a recent slot is missing": lambda r, x, b, n: not set(range(len(x) - n, len(x))) <= set(r.tolist()),
    },
)

# 3. Design: which method for which task.

design = Choice(
    "design",
    "b",
    {
        "a": "H2O cannot know which fact the last question will ask for: attention to that fact comes only "
        "after it was evicted",
        "b": "a running conversation needs its recent turns and fluent text; what was said long ago may go, "
        "and the memory stays bounded",
        "c": "the sinks hold four tokens, not the contract: the clause that is asked for is gone",
        "d": "exact copying needs every token; any of them may be the next one",
    },
)
