# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 6: offloading."""

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


step_seconds = Exercise(
    "step_seconds",
    _step_seconds,
    lambda: [
        ([3], [5], 2),
        ([4, 2], [5, 3], 2),
        ([1, 6, 2, 5], [4, 1, 7, 2], 4),
        ([9, 1, 1, 8, 2], [2, 3, 6, 1, 4], 2),
        ([2, 7, 3, 1, 5], [6, 2, 4, 8, 1], 1),
        ([8, 1, 2, 9, 3, 4, 1], [1, 2, 1, 5, 1, 9, 2], 3),
    ],
    {
        "link and device take turns here; while a layer attends, the next one is on its way": (
            lambda compute, transfer, buffers: sum(compute) + sum(transfer)
        ),
        "the larger of the two sums leaves out that the first layer must be there before anything is computed": (
            lambda compute, transfer, buffers: max(sum(compute), sum(transfer))
        ),
        "the larger of the two for each layer compares a layer with itself; it hides behind the one before": (
            lambda compute, transfer, buffers: sum(map(max, compute, transfer))
        ),
        "the number of buffers is not used: a transfer may have to wait until a layer has attended": _timed(
            begins=lambda link, done, layer, buffers: link
        ),
        "one buffer too many is free: with two, layer 2 waits for layer 0": _timed(more=1),
        "one buffer too few is free: with two, layer 2 waits for layer 0, not for layer 1": _one_buffer_less,
        "all transfers begin at 0 here; there is one link, which carries one layer after the other": _timed(
            begins=lambda link, done, layer, buffers: 0
        ),
        "a layer begins when it is there, even if the one before still computes: the device does one at a time": (
            _timed(waits=lambda device, link: link)
        ),
        "a layer begins before it is there: wait for the link, too": _timed(
            waits=lambda device, link: device
        ),
        "that is when the link is done; the last layer has still to attend": _timed(
            give=lambda device, link, done, compute, transfer: link
        ),
        "those are the times at which the layers are done; asked for is the last of them": _timed(
            give=lambda device, link, done, compute, transfer: done
        ),
        "that is how long the device waits; asked for is the time of the whole step": _timed(
            give=lambda device, link, done, compute, transfer: device - sum(compute)
        ),
        "the last layer's computation is missing": _timed(
            give=lambda device, link, done, compute, transfer: device - compute[-1]
        ),
        "the first layer's transfer is missing: nothing can be computed before it is there": _timed(
            give=lambda device, link, done, compute, transfer: device - transfer[0]
        ),
        "that is the speed-up over taking turns; asked for is the time": _timed(
            give=lambda device, link, done, compute, transfer: (sum(compute) + sum(transfer)) / device
        ),
    },
    "a layer begins when it is there and the device is free, and is fetched when the link and a buffer are",
    grows=(
        "one layer",
        "two layers: the second hides behind the first",
        "layers of all kinds, and a buffer for each",
        "two buffers: the link may have to wait",
        "one buffer: nothing hides",
        "three buffers",
    ),
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


schedule = Exercise(
    "schedule",
    _schedule,
    lambda: [(4,), (3,), (7,)],
    {
        "a layer is asked for only after the one before has attended: link and device take turns, nothing is "
        "fetched ahead": _after_attending,
        "the next layer is asked for after the wait: ask first, so that the link never stands still": (
            _after_waiting
        ),
        "the last layer has no next one in this step: you ask for a layer that does not exist": _one_too_many,
        "you wait for the next layer before this one attends: wait for the layer whose turn it is": (
            _wrong_wait
        ),
        "nobody asks for layer 0: its wait never ends": lambda layers: _schedule(layers)[1:],
        "all layers are asked for at once: the device would have to hold the whole cache again": (
            _all_at_once
        ),
        "the loop stops one layer early: the last one never attends": lambda layers: _schedule(layers)[:-2],
        "a layer attends without a wait: its keys may not be there yet": (
            lambda layers: [one for one in _schedule(layers) if one[0] != "wait"]
        ),
        "only layer 0 is asked for: the other waits never end": (
            lambda layers: [one for one in _schedule(layers) if one[0] != "ask" or one[1] == 0]
        ),
        "it waits and fetches, and no layer attends": (
            lambda layers: [one for one in _schedule(layers) if one[0] != "attend"]
        ),
        "layer 0 is asked for twice: the loop asks for layer + 1": (
            lambda layers: (
                [("ask", 0)] + [e for i in range(layers) for e in (("ask", i), ("wait", i), ("attend", i))]
            )
        ),
        "layer numbers start at 1 here: they start at 0": (
            lambda layers: [(what, layer + 1) for what, layer in _schedule(layers)]
        ),
        "you fetch two layers ahead: three layers would be held": _two_ahead,
        "wait and attend are exchanged: a layer attends before it is there": (
            lambda layers: [
                ({"wait": "attend", "attend": "wait"}.get(what, what), layer)
                for what, layer in _schedule(layers)
            ]
        ),
        "only the last layer: `events` begins anew in the loop": (
            lambda layers: [("ask", layers - 1), ("wait", layers - 1), ("attend", layers - 1)]
        ),
    },
    "while a layer attends, the link is busy with the next one",
    given=_as_found,
    signs={
        'one event is a pair, as ("ask", 0): append pairs': lambda r, n: any(
            isinstance(one, str) for one in r
        ),
        "a layer is asked for that does not exist": lambda r, n: any(
            what == "ask" and not 0 <= int(i) < n for what, i in r
        ),
        "a layer attends before it was waited for": lambda r, n: any(
            what == "attend" and ["wait", i] not in [list(one) for one in r[:at]]
            for at, (what, i) in enumerate(r)
        ),
        "a wait never ends: nobody asked for this layer before": lambda r, n: any(
            what == "wait" and ["ask", i] not in [list(one) for one in r[:at]]
            for at, (what, i) in enumerate(r)
        ),
        "a layer is asked for twice": lambda r, n: len([1 for what, _ in r if what == "ask"]) > n,
        "not every layer attends": lambda r, n: len([1 for what, _ in r if what == "attend"]) < n,
    },
)

# 3. Decide: what to do about a link that is always busy.

slow_link = Choice(
    "slow_link",
    "d",
    {
        "a": "40 layers x 21 milliseconds of transfer are 840 milliseconds whether a layer computes 1.4 milliseconds or 0.7: a faster device only "
        "waits longer",
        "b": "the link is busy without a pause already, 840 milliseconds of 841: asking earlier does not make it carry more",
        "c": "a fifth of the bytes take 168 milliseconds, and 200 are allowed; but what is evicted is gone for good, and a "
        "later question may want it",
        "d": "a tenth of the bytes take 84 milliseconds, nothing is thrown away, and what one step leaves on the host the next "
        "may fetch; how to know the tenth in time is chapter 7",
    },
)
