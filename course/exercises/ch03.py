# ruff: noqa: E501 (a sentence stands on its own line)
"""Chapter 3: static buffers."""

from course.teaching.check.exercise import Choice, Exercise

# 1. A table of pages.


def _pages(
    full=lambda held, block: held % block == 0,
    take=min,
    slot=lambda held, block: held % block,
    back=lambda pages: pages,
    shared=False,
    forgets=True,
):
    """The table with one of its parts exchanged."""

    def place(events, block):
        table, length, free, made, places = {}, {}, [], 0, []
        for what, text in events:
            name = "all" if shared else text
            if what == "end":
                free += back(table.get(name, []))
                if forgets:
                    table[name], length[name] = [], 0
                continue
            held = length.get(name, 0)
            if full(held, block) or not table.get(name):
                page = take(free) if free else made
                free.remove(page) if free else None
                made += page == made
                table.setdefault(name, []).append(page)
            places.append((table[name][-1], slot(held, block)))
            length[name] = held + 1
        return places

    return place


_place = _pages()


def _events():
    add = lambda words: [("add", text) for text in words.split()]
    end = lambda text: [("end", text)]
    return [
        (add("a a a"), 4),
        (add("a a a a a"), 2),
        (add("a b a b a b b"), 2),
        (add("a b a b a") + end("a") + add("c c b c"), 2),
        (add("a b c d b") + end("b") + end("a") + add("e e e d") + end("e") + add("a a"), 1),
        (add("a a a a a b b") + end("a") + add("a b b c a") + end("b") + add("c c c c d"), 3),
    ]


def _from_the_end(events, block):
    return [(page, slot) for slot, page in _place(events, block)]


def _two_in_one(places, events, block):
    """Whether a text writes into a page that another one holds."""
    owner, added = {}, iter(places.tolist())
    for what, text in events:
        if what == "end":
            owner = {page: one for page, one in owner.items() if one != text}
        elif owner.setdefault(next(added)[0], text) != text:
            return True
    return False


place = Exercise(
    "place",
    _place,
    _events,
    {
        "a page for every token: a page has `block` slots": _pages(full=lambda held, block: True),
        "one page for each text, whatever its length: a full page needs a next one": _pages(
            full=lambda held, block: False, slot=lambda held, block: held
        ),
        "a full page begins anew at slot 0 and overwrites its tokens: take another page": _pages(
            full=lambda held, block: False
        ),
        "the next page comes a token too late: with `block` tokens held the page is full": _pages(
            full=lambda held, block: held > block and held % block == 1, slot=lambda held, block: held % block
        ),
        "slots are counted from 0 in every page": _pages(slot=lambda held, block: held % block + 1),
        "that is the token's number in its text; in its page it is the remainder by `block`": _pages(
            slot=lambda held, block: held
        ),
        "texts share a page here: no other text writes into a text's page": _pages(shared=True),
        "the pages of a text that has ended never come back: others could use them": _pages(
            back=lambda pages: []
        ),
        "only the last page of a text comes back; all of its pages are free": _pages(
            back=lambda pages: pages[-1:]
        ),
        "only the first page of a text comes back; all of its pages are free": _pages(
            back=lambda pages: pages[:1]
        ),
        "of the free pages the one with the smallest number is taken, not the largest": _pages(take=max),
        "of the free pages the smallest number is taken, not the one that came back last": _pages(
            take=lambda free: free[-1]
        ),
        "of the free pages the smallest number is taken, not the one that came back first": _pages(
            take=lambda free: free[0]
        ),
        "a text that has ended still has its length and pages when its name comes again": _pages(
            forgets=False
        ),
        "page and slot are exchanged: (page, slot)": _from_the_end,
        "those are the pages alone; asked for are (page, slot)": (
            lambda events, block: [page for page, _ in _place(events, block)]
        ),
        "those are the slots alone; asked for are (page, slot)": (
            lambda events, block: [slot for _, slot in _place(events, block)]
        ),
        "pages are counted from 0": (
            lambda events, block: [(page + 1, slot) for page, slot in _place(events, block)]
        ),
        "that is one address in the pool, page * block + slot; asked for are both": (
            lambda events, block: [page * block + slot for page, slot in _place(events, block)]
        ),
        "the last token is missing": lambda events, block: _place(events, block)[:-1],
    },
    "no text reserves more than the page that it writes into, and what has ended serves the next",
    holds="indices",
    grows=(
        "one text in one page",
        "a text longer than a page",
        "two texts in turn",
        "a text that ends gives its pages back",
        "pages of one token, many texts",
        "a name that comes again",
    ),
    signs={
        "two texts write into one page: a page belongs to one text": _two_in_one,
        "asked for is one place for every token that is added": lambda r, events, block: (
            len(r) != sum(what == "add" for what, _ in events)
        ),
        "there is no slot `block`: the slots of a page are 0 to block - 1": lambda r, events, block: bool(
            (r[:, 1] >= block).any()
        ),
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
    given=lambda seen, window: [slot >= window - seen - 1 for slot in range(window)],
    signs={
        "a mask has one boolean for each of the `window` slots": lambda r, seen, window: len(r) != window,
        "padding is attended to": lambda r, seen, window: bool(r.sum() > min(seen, window)),
        "a token is masked": lambda r, seen, window: bool(r.sum() < min(seen, window)),
    },
)

# 3. Decide: which policy.

policy = Choice(
    "policy",
    "b",
    {
        "a": "it fits with 1.07 GB, but shifting copies the whole window for every token: 1.07 GB of copies, beside "
        "13.5 GB of weights that are read anyway, where 0.54 GB of memory could buy them away",
        "b": "1.61 GB of 1.7 fit, and a copy of 1.07 GB comes once in 1,024 tokens: about 1 MB for each token, "
        "hardly any of the work",
        "c": "two windows take 2.15 GB, and 1.7 are left: the copies that they save are not worth another machine",
        "d": "1.07 GB and no copy at all, but a ring would need an engine that takes an index and a mask out of "
        "order; this one reads a contiguous, left-padded tensor",
    },
)
