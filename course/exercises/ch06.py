# ruff: noqa: E501 (a sentence is one line)
"""Chapter 6: offloading."""

from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. The time of a step.


def _layers(draw):
    """Layers of all kinds, in tenths of a second: each wrong clock is seen in the test that is meant for it."""
    seconds = lambda *ends: [whole(draw, low, high) / 10 for low, high in ends]

    def waits(buffers, more):
        """A long first layer, for which the transfer `buffers` places further has to wait."""
        short = [(8, 12)] * buffers
        return (
            seconds((80, 95), *short, *[(8, 20)] * more),
            seconds(*short, (35, 45), *[(45, 60)] * more),
            buffers,
        )

    return [
        (*(seconds((10, 99)) for _ in range(2)), 2),
        (seconds((70, 95), (10, 60)), seconds((10, 30), (40, 60)), 2),
        (seconds((45, 55), (15, 25), (35, 45), (60, 90)), seconds((15, 25), (15, 25), (75, 95), (10, 20)), 4),
        waits(2, whole(draw, 3, 5)),
        (*(seconds(*[(10, 99)] * 6) for _ in range(2)), 1),
        waits(3, whole(draw, 3, 5)),
    ]


step_seconds = Exercise(
    "step_seconds",
    RIGHT["step_seconds"],
    _layers,
    MISTAKES["step_seconds"],
    "a layer begins when it is there and the device is free, and is fetched when the link and a buffer are",
    grows=(
        "one layer",
        "two layers: the transfer of the second hides behind the first",
        "layers of all kinds, and a buffer for each",
        "two buffers: the link may have to wait",
        "one buffer: nothing hides",
        "three buffers",
    ),
    signs={
        "one layer hides nothing: it takes its transfer, then its computation": (
            lambda r, right, compute, *more: len(compute) == 1
        ),
        "two layers take transfer 0, then the longer of computation 0 and transfer 1, then computation 1": (
            lambda r, right, compute, *more: len(compute) == 2
        ),
        "with one buffer nothing hides: all transfers and computations come one after the other": (
            lambda r, right, compute, transfer, buffers: buffers == 1
        ),
        "each layer has a buffer here: a transfer waits for the link only, a layer for its transfer and the layer before": (
            lambda r, right, compute, transfer, buffers: buffers >= len(compute)
        ),
        "a transfer waits for the link, and for the layer `buffers` before it to attend": lambda *case: True,
    },
    shapes={"return one number: the seconds of the whole step": lambda *case: True},
)

# 2. The planted bug: when the next layer is asked for.


def _as_found(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        events.append(("wait", layer))
        events.append(("attend", layer))
        if layer + 1 < layers:
            events.append(("ask", layer + 1))  # something is wrong here
    return events


def _places(events, what):
    """layer -> where in the list this happens to it first."""
    return {int(layer): at for at, (name, layer) in reversed([*enumerate(events)]) if name == what}


_EVENTS = {
    'one event is a pair, as ("ask", 0): append pairs': lambda r, *case: any(
        isinstance(one, str) for one in r
    ),
    "there are events other than ask, wait and attend": lambda r, *case: any(
        what not in ("ask", "wait", "attend") for what, _ in r
    ),
    "there is a layer that does not exist: they are 0 to n - 1": lambda r, right, n: any(
        not 0 <= layer < n for _, layer in r
    ),
    "not every layer attends": lambda r, right, n: len(_places(r, "attend")) < n,
    "a layer attends twice": lambda r, right, n: sum(what == "attend" for what, _ in r) > n,
    "the layers do not attend in their order": lambda r, right, n: (
        [int(layer) for what, layer in r if what == "attend"] != list(range(n))
    ),
    "a wait never ends: this layer was not asked for before": lambda r, right, n: any(
        at < _places(r, "ask").get(layer, len(r)) for layer, at in _places(r, "wait").items()
    ),
    "a layer attends before it was waited for": lambda r, right, n: any(
        at < _places(r, "wait").get(layer, len(r)) for layer, at in _places(r, "attend").items()
    ),
    "a layer is asked for twice": lambda r, right, n: sum(what == "ask" for what, _ in r) > n,
    "a layer is waited for twice": lambda r, right, n: sum(what == "wait" for what, _ in r) > n,
    "a layer is asked for too early: three layers would be held": lambda r, right, n: any(
        at < _places(r, "attend")[layer - 2] for layer, at in _places(r, "ask").items() if layer > 1
    ),
    "a layer is asked for too late: ask for it before the wait of the layer before": lambda r, right, n: any(
        at > _places(r, "wait")[layer - 1] for layer, at in _places(r, "ask").items() if layer
    ),
}


schedule = Exercise(
    "schedule",
    RIGHT["schedule"],
    lambda draw: [(layers,) for layers in [*shuffled(draw, [*range(3, 24)])[:3], 2, 1]],
    MISTAKES["schedule"],
    "while a layer attends, the link is busy with the next one",
    given=_as_found,
    signs=_EVENTS,
    shapes=_EVENTS,
)

# 3. Decide: what to do about a link that is always busy.

slow_link = Choice(
    "slow_link",
    "d",
    {
        "a": "40 layers x 21 milliseconds of transfer are 840 milliseconds, whether a layer computes for 1.3 milliseconds or half of that. A faster device only waits longer",
        "b": "the link is already busy for 840 milliseconds of 841. It carries no more if you ask earlier",
        "c": "a fifth of the bytes take 168 milliseconds, and 200 are allowed. But evicted tokens are gone for good, and a later question may need them",
        "d": "a tenth of the bytes take 84 milliseconds, and nothing is thrown away: the next step may fetch the tokens that this one leaves on the host. Chapter 7 shows how to know the tenth in time",
    },
)
