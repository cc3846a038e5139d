"""Chapter 3: static buffers."""

from .exercise import Choice, Exercise

# 1. Where the window starts.


def _window_start(appended, spare):
    return appended % (spare + 1)


window_start = Exercise(
    "window_start",
    _window_start,
    lambda: [(0, 7), (5, 7), (7, 7), (8, 7), (20, 7), (9, 3), (4, 0)],
    {
        "the window never comes back: after `spare` moves there is no memory behind it": (
            lambda appended, spare: appended
        ),
        "off by one: with `spare` free rows the window can stand at spare + 1 places": (
            lambda appended, spare: appended % spare  # and so an error where nothing is spare
        ),
        "that is the number of copies; the start is what remains": (
            lambda appended, spare: appended // (spare + 1)
        ),
        "the window stops at the end of the buffer instead of being copied back": (
            lambda appended, spare: min(appended, spare)
        ),
    },
    "one row further with each token, and back to the front by one copy",
)


# 2. The mask of a left-padded window.


def _real_slots(seen, window):
    return [slot >= window - seen for slot in range(window)]


real_slots = Exercise(
    "real_slots",
    _real_slots,
    lambda: [(0, 5), (2, 5), (5, 5), (9, 5), (1, 4)],
    {
        "that is right padding: in a left-padded window the tokens stand at the end": (
            lambda seen, window: [slot < seen for slot in range(window)]
        ),
        "off by one: one slot of padding is attended to": (
            lambda seen, window: [slot >= window - seen - 1 for slot in range(window)]
        ),
        "off by one: the oldest token is masked": (
            lambda seen, window: [slot > window - seen for slot in range(window)]
        ),
        "True and False are turned around: padding would be attended to and tokens would not": (
            lambda seen, window: [slot < window - seen for slot in range(window)]
        ),
    },
    "tokens at the end, padding before them",
)

# 3. Design: which policy.

policy = Choice(
    "policy",
    "b",
    {
        "a": "shifting copies the whole window for every token: here more bytes than the model's weights",
        "b": "1.5 windows fit, and a copy comes once in (S - 1) / 2 + 1 tokens: hardly any of the work",
        "c": "two windows do not fit into the memory that is left",
        "d": "a ring would need an engine that takes an index and a mask out of order; this one reads a "
        "contiguous, left-padded tensor",
    },
)
