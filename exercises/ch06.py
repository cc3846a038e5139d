"""Chapter 6: offloading."""

from course.teaching.check.exercise import Choice, Exercise

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
        "you multiplied by the time: a bandwidth is bytes divided by seconds": (
            lambda n, per, ms, share: share * n * per * (ms / 1e3) / 1e9
        ),
        "a millisecond is a thousandth of a second: divide by 1000, do not multiply": (
            lambda n, per, ms, share: share * n * per / (ms * 1e3) / 1e9
        ),
        "that is in gigabits; asked for are gigabytes": (
            lambda n, per, ms, share: 8 * _link_needed(n, per, ms, share)
        ),
        "per_token is in bytes already: no division by 8": (
            lambda n, per, ms, share: _link_needed(n, per, ms, share) / 8
        ),
        "that is in MB per second; asked for are GB per second": (
            lambda n, per, ms, share: 1e3 * _link_needed(n, per, ms, share)
        ),
        "that is how many GB cross; divide by the time of the step": (
            lambda n, per, ms, share: share * n * per / 1e9
        ),
        "the tokens are missing: every one that crosses brings per_token bytes": (
            lambda n, per, ms, share: share * per / (ms / 1e3) / 1e9
        ),
        "that is the part that stays on the device; asked for is the part that crosses": (
            lambda n, per, ms, share: _link_needed(n, per, ms, 1 - share)
        ),
        "the share is no percentage: 0.1 is a tenth": (
            lambda n, per, ms, share: _link_needed(n, per, ms, share) / 100
        ),
        "seconds for each byte: turn the fraction around": (
            lambda n, per, ms, share: (ms / 1e3) / (share * n * per / 1e9)
        ),
        "// cuts off what comes after the point: divide with /": (
            lambda n, per, ms, share: share * n * per // ms // 1e6
        ),
        "the bytes are missing: that is tokens per second": lambda n, per, ms, share: share * n / (ms / 1e3),
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
