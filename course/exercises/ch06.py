# ruff: noqa: E501 (a sentence is one line)
"""Chapter 6: offloading."""

from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

# 1. The time of a step.


def _timed(
    begins=lambda link, done, layer, buffers: max(link, done[layer - buffers]) if layer >= buffers else link,
    waits=max,
    give=lambda device, link, done, compute, transfer: device,
    more=0,
):
    """The clock of a step with one part exchanged."""

    def step_seconds(compute, transfer, buffers):
        link, device, done = 0, 0, []
        for layer in range(len(compute)):
            link = begins(link, done, layer, buffers + more) + transfer[layer]  # the layer is there
            device = waits(device, link) + compute[layer]  # and has attended
            done.append(device)
        return give(device, link, done, compute, transfer)

    return step_seconds


_step_seconds = _timed()


def _one_buffer_less(compute, transfer, buffers):
    return _step_seconds(compute, transfer, max(1, buffers - 1))


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
    _step_seconds,
    _layers,
    {
        "link and device take turns here: while a layer attends, the next one is on its way": (
            lambda compute, transfer, buffers: sum(compute) + sum(transfer)
        ),
        "that is the larger of the two sums: the first layer must arrive before anything is computed": (
            lambda compute, transfer, buffers: max(sum(compute), sum(transfer))
        ),
        "you take the larger of the two for each layer: a transfer hides behind the layer before": (
            lambda compute, transfer, buffers: sum(map(max, compute, transfer))
        ),
        "no transfer waits for a buffer: it may have to wait until an earlier layer has attended": _timed(
            begins=lambda link, done, layer, buffers: link
        ),
        "your clock has one buffer too many: with two, layer 2 waits for layer 0": _timed(more=1),
        "your clock has one buffer too few: with two, layer 2 waits for layer 0, not for layer 1": _one_buffer_less,
        "a transfer waits for its buffer, and not for the link: it must wait for both": _timed(
            begins=lambda link, done, layer, buffers: done[layer - buffers] if layer >= buffers else link
        ),
        "all transfers begin at 0: the one link carries one layer after the other": _timed(
            begins=lambda link, done, layer, buffers: 0
        ),
        "a layer begins when it is there, even if the one before still attends: the device does one at a time": (
            _timed(waits=lambda device, link: link)
        ),
        "a layer attends before its transfer has ended: wait for the link, too": _timed(
            waits=lambda device, link: device
        ),
        "that is when the link is done: the last layer has to attend after that": _timed(
            give=lambda device, link, done, compute, transfer: link
        ),
        "those are the times at which the layers are done: return the last of them": _timed(
            give=lambda device, link, done, compute, transfer: done
        ),
        "that is how long the device waits: return the time of the whole step": _timed(
            give=lambda device, link, done, compute, transfer: device - sum(compute)
        ),
        "the computation of the last layer is missing": _timed(
            give=lambda device, link, done, compute, transfer: device - compute[-1]
        ),
        "the transfer of the first layer is missing: nothing is computed before it is there": _timed(
            give=lambda device, link, done, compute, transfer: device - transfer[0]
        ),
        "that is the speed-up over taking turns: return the time": _timed(
            give=lambda device, link, done, compute, transfer: (sum(compute) + sum(transfer)) / device
        ),
    },
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
        "a transfer waits for the link, and until the layer `buffers` places before it has attended": (
            lambda *case: True
        ),
    },
    shapes={"return one number: the seconds of the whole step": lambda *case: True},
)

# 2. The planted bug: when the next layer is asked for.


def _schedule(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        if layer + 1 < layers:
            events.append(("ask", layer + 1))
        events += [("wait", layer), ("attend", layer)]
    return events


def _after_attending(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        events += [("wait", layer), ("attend", layer)]
        if layer + 1 < layers:
            events.append(("ask", layer + 1))
    return events


def _after_waiting(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        events.append(("wait", layer))
        if layer + 1 < layers:
            events.append(("ask", layer + 1))
        events.append(("attend", layer))
    return events


def _as_found(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        events.append(("wait", layer))
        events.append(("attend", layer))
        if layer + 1 < layers:
            events.append(("ask", layer + 1))  # something is wrong here
    return events


def _two_ahead(layers):
    events = [("ask", layer) for layer in range(min(2, layers))]
    for layer in range(layers):
        if layer + 2 < layers:
            events.append(("ask", layer + 2))
        events += [("wait", layer), ("attend", layer)]
    return events


def _one_too_many(layers):
    events = [("ask", 0)]
    for layer in range(layers):
        events += [("ask", layer + 1), ("wait", layer), ("attend", layer)]
    return events


def _wrong_wait(layers):
    return [("wait", min(i + 1, layers - 1)) if e == "wait" else (e, i) for e, i in _schedule(layers)]


def _all_at_once(layers):
    asked = [("ask", layer) for layer in range(layers)]
    return asked + [event for layer in range(layers) for event in (("wait", layer), ("attend", layer))]


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
    _schedule,
    lambda draw: [(layers,) for layers in shuffled(draw, [3, 4, 5, 6, 7, 8])[:3]],
    {
        "you ask for a layer only after the one before has attended: link and device take turns": _after_attending,
        "you ask for the next layer after the wait: ask first, so that the link is never idle": (
            _after_waiting
        ),
        "you ask for a layer that does not exist: the last layer has no next one": _one_too_many,
        "you wait for the next layer before this one attends: wait for this one": (_wrong_wait),
        "you never ask for layer 0, so its wait never ends": lambda layers: _schedule(layers)[1:],
        "you ask for all layers at once: the device has room for two": (_all_at_once),
        "the last layer is missing: it never attends": lambda layers: _schedule(layers)[:-2],
        "no layer waits: its keys may not be there yet": (
            lambda layers: [one for one in _schedule(layers) if one[0] != "wait"]
        ),
        "you ask for layer 0 only, so the other waits never end": (
            lambda layers: [one for one in _schedule(layers) if one[0] != "ask" or one[1] == 0]
        ),
        "no layer attends": (lambda layers: [one for one in _schedule(layers) if one[0] != "attend"]),
        "you ask for layer 0 twice, and for each layer only at its own turn: ask for layer + 1": (
            lambda layers: (
                [("ask", 0)] + [e for i in range(layers) for e in (("ask", i), ("wait", i), ("attend", i))]
            )
        ),
        "your layers have the numbers 1 to n: they are 0 to n - 1": (
            lambda layers: [(what, layer + 1) for what, layer in _schedule(layers)]
        ),
        "you ask two layers ahead: the device would hold three layers": _two_ahead,
        "wait and attend are exchanged: a layer waits first, and then attends": (
            lambda layers: [
                ({"wait": "attend", "attend": "wait"}.get(what, what), layer)
                for what, layer in _schedule(layers)
            ]
        ),
        "only the last layer is in your list: is `events` made empty in the loop?": (
            lambda layers: [("ask", layers - 1), ("wait", layers - 1), ("attend", layers - 1)]
        ),
    },
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
        "a": "40 layers x 21 milliseconds of transfer are 840 milliseconds, whether a layer computes for 1.4 milliseconds or 0.7. A faster device only waits longer",
        "b": "the link is already busy for 840 milliseconds of 841. It carries no more if you ask earlier",
        "c": "a fifth of the bytes take 168 milliseconds, and 200 are allowed. But evicted tokens are gone for good, and a later question may need them",
        "d": "a tenth of the bytes take 84 milliseconds, and nothing is thrown away: the next step may fetch the tokens that this one leaves on the host. Chapter 7 shows how to know the tenth in time",
    },
)
