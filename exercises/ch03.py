"""Chapter 3: static buffers."""

from course.teaching.check.exercise import Choice, Exercise

# 1. Where the window starts.


def _window_start(appended, spare):
    return appended % (spare + 1)


window_start = Exercise(
    "window_start",
    _window_start,
    lambda: [(0, 7), (5, 7), (7, 7), (8, 7), (20, 7), (9, 3), (4, 0), (9, 5), (13, 4)],
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
        "off by one: after 0 tokens the window stands at row 0": (
            lambda appended, spare: (appended + 1) % (spare + 1)
        ),
        "off by one: the window has moved once for each token appended": (
            lambda appended, spare: (appended - 1) % (spare + 1)
        ),
        "the window can stand at spare + 1 places, not spare + 2": lambda appended, spare: (
            appended % (spare + 2)
        ),
        "the window runs backwards: it starts at row 0 and moves towards the end": (
            lambda appended, spare: spare - appended % (spare + 1)
        ),
        "% binds before +: write appended % (spare + 1)": lambda appended, spare: appended % spare + 1,
        "divided and remainder are exchanged: appended % places": (
            lambda appended, spare: (spare + 1) % max(appended, 1)
        ),
        "that is the row of the newest token, behind the window; asked for is where the window starts": (
            lambda appended, spare: appended % (spare + 1) + spare
        ),
        "the window never moves: every token shifts it by one row": lambda appended, spare: 0,
        "the division must give a whole number: a row is an index (// or %, not /)": (
            lambda appended, spare: appended / (spare + 1)
        ),
        "after the last place you start at row 1: it goes back to row 0": (
            lambda appended, spare: appended if appended <= spare else (appended - 1) % max(spare, 1) + 1
        ),
        "you stay at row 0 after the first copy: the window moves on from there": (
            lambda appended, spare: appended if appended <= spare else 0
        ),
        "you come back once only: take the remainder, for it comes back again and again": (
            lambda appended, spare: appended if appended <= spare else appended - spare - 1
        ),
        "the remainder is taken of spare - 1: the window can stand at spare + 1 places": (
            lambda appended, spare: appended % (spare - 1) if spare > 1 else 0
        ),
        "the window turns around at the end: it is copied back to row 0 instead": (
            lambda appended, spare: spare - abs(appended % (2 * spare) - spare) if spare else 0
        ),
    },
    "one row further with each token, and back to the front by one copy",
    holds="indices",
    signs={
        "a row before the buffer: the window starts at row 0 or later": lambda r, a, s: r < 0,
        "the window runs out of the buffer: the last place is row `spare`": lambda r, a, s: r > s,
    },
)


# 2. The mask of a left-padded window.


def _real_slots(seen, window):
    return [slot >= window - seen for slot in range(window)]


real_slots = Exercise(
    "real_slots",
    _real_slots,
    lambda: [(0, 5), (2, 5), (5, 5), (9, 5), (1, 4), (11, 5)],
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
        "every slot is attended to: the mask is forgotten": lambda seen, window: [True] * window,
        "nothing is attended to": lambda seen, window: [False] * window,
        "only the newest token is attended to: the earlier ones stand before it": (
            lambda seen, window: [slot == window - 1 and seen > 0 for slot in range(window)]
        ),
        "that is one boolean too many: a mask has `window` of them": (
            lambda seen, window: [slot >= window - seen for slot in range(window + 1)]
        ),
        "a mask has `window` booleans, here it has `seen`": lambda seen, window: [True] * seen,
        "those are the numbers of the slots; asked for is a mask of True and False": (
            lambda seen, window: list(range(max(0, window - seen), window))
        ),
        "the first slot of the window is always masked, even when the window is full": (
            lambda seen, window: [slot >= max(1, window - seen) for slot in range(window)]
        ),
        "the mask grows beyond the window: once it is full it stays full": (
            lambda seen, window: [False] * (window - seen) + [True] * seen
        ),
        "once more tokens came than fit, nothing is attended to; the window stays full": (
            lambda seen, window: [seen <= window and slot >= window - seen for slot in range(window)]
        ),
        "the comparison is with `seen`; the first token stands at window - seen": (
            lambda seen, window: [slot >= seen for slot in range(window)]
        ),
        "off by one in a right-padded mask; in a left-padded window the tokens stand at the end": (
            lambda seen, window: [slot <= seen for slot in range(window)]
        ),
        "that is the number of tokens; asked for is a boolean for each slot": (
            lambda seen, window: min(seen, window)
        ),
        "the remainder starts the window anew; once it is full it stays full": (
            lambda seen, window: [slot >= window - seen % window for slot in range(window)]
        ),
    },
    "tokens at the end, padding before them",
    holds="booleans",
    given=lambda seen, window: [slot < seen for slot in range(window)],
    signs={
        "a mask has one boolean for each of the `window` slots": lambda r, seen, window: len(r) != window,
        "padding is attended to": lambda r, seen, window: bool(r.sum() > min(seen, window)),
        "a token is masked": lambda r, seen, window: bool(r.sum() < min(seen, window)),
    },
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
