"""Chapter 6: offloading."""

from .exercise import Choice, Exercise

# 1. What a link must carry.


def _link_needed(tokens, per_token, step_ms, share):
    return share * tokens * per_token / (step_ms / 1e3) / 1e9


link_needed = Exercise(
    "link_needed",
    _link_needed,
    lambda: [(1000, 524_288, 27.99, 1.0), (32_000, 524_288, 112.46, 0.1), (2048, 1_376_256, 60.0, 0.25)],
    {
        "step_ms is in milliseconds: divide it by 1000 first": (
            lambda n, per, ms, share: share * n * per / ms / 1e9
        ),
        "that is GiB per second; the task asks for GB per second, so divide by 1e9": (
            lambda n, per, ms, share: share * n * per / (ms / 1e3) / 2**30
        ),
        "that is bytes per second; the task asks for GB per second, so divide by 1e9": (
            lambda n, per, ms, share: share * n * per / (ms / 1e3)
        ),
        "the share is missing: only that part of the cache crosses the link": (
            lambda n, per, ms, share: n * per / (ms / 1e3) / 1e9
        ),
        "you divided by the share; a tenth of the cache needs a tenth of the bandwidth": (
            lambda n, per, ms, share: n * per / share / (ms / 1e3) / 1e9
        ),
        "per_token counts keys and values already: no second factor of 2": (
            lambda n, per, ms, share: 2 * share * n * per / (ms / 1e3) / 1e9
        ),
    },
    "bytes that cross in one step, divided by the time of the step",
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
    },
    "while a layer attends, the link is busy with the next one",
)

# 3. Design: what to do about a link that is always busy.

slow_link = Choice(
    "slow_link",
    "d",
    {
        "a": "the device waits for the link nearly all the time: a faster one waits longer",
        "b": "the link is busy without a pause already: asking earlier does not make it carry more",
        "c": "it does shorten the step, but what is evicted is gone for good: a later question may want it",
        "d": "nothing is thrown away and only what this step attends to crosses the link; how to know it in "
        "time is chapter 7",
    },
)
