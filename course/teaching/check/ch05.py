"""Chapter 5: eviction."""

import torch

from .exercise import Choice, Exercise

# 1. Sinks: which slots stay.


def _sink_slots(tokens, sinks, budget):
    return list(range(sinks)) + list(range(tokens - (budget - sinks), tokens))


sink_slots = Exercise(
    "sink_slots",
    _sink_slots,
    lambda: [(20, 4, 10), (9, 1, 4), (30, 0, 5), (12, 3, 11)],
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
    },
    "the first tokens and the most recent ones, within the budget",
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
    ]


def _lightest(received, budget, recent):
    window = len(received) - recent
    return received[:window].topk(budget - recent, largest=False).indices.sort().values.tolist() + list(
        range(window, len(received))
    )


def _no_window(received, budget, recent):
    return received.topk(budget).indices.sort().values.tolist()


def _window_may_be_heavy(received, budget, recent):
    heavy = received.topk(budget - recent).indices
    return sorted(set(heavy.tolist()) | set(range(len(received) - recent, len(received))))


def _newest_evicted(received, budget, recent):
    window = len(received) - recent - 1
    heavy = received[:window].topk(budget - recent).indices.sort().values
    return heavy.tolist() + list(range(window, len(received) - 1))


def _unsorted(received, budget, recent):
    window = len(received) - recent
    return received[:window].topk(budget - recent).indices.tolist() + list(range(window, len(received)))


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
        "the slots are out of order: sort them by position": _unsorted,
    },
    "heavy ones and recent ones, each within its share of the budget",
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
