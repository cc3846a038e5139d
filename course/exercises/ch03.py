# ruff: noqa: E501 (a sentence is one line)
"""Chapter 3: static buffers."""

from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise

# 1. A table of pages.


def _pages(
    full=lambda held, block: held % block == 0,
    take=min,
    slot=lambda held, block: held % block,
    back=lambda pages: pages,
    shared=False,
    forgets=True,
    loses=False,
):
    """The table with one of its parts exchanged."""

    def place(events, block):
        table, length, free, made, places = {}, {}, [], 0, []
        for what, text in events:
            name = "all" if shared else text
            if what == "end":
                free = ([] if loses else free) + back(table.get(name, []))
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


def _story(draw, texts, adds, ends=0):
    """Events of some texts in any order: `adds` tokens, and `ends` times some texts end, which may begin again."""
    events, held = [], set()
    for number in range(adds):
        text = texts[whole(draw, 0, len(texts) - 1)]
        held.add(text)
        events.append(("add", text))
        if len(held) > 1 and ends * (number + 1) // adds > ends * number // adds:
            gone = shuffled(draw, sorted(held))[: len(held) - 1]  # all texts but one
            held -= {*gone}
            events += [("end", text) for text in gone]
    return events


def _events(draw):
    block = whole(draw, 3, 5)
    return [
        ([("add", "a")] * block, block),
        ([("add", "a")] * whole(draw, 7, 9), whole(draw, 2, 3)),
        ([("add", text) for text in "aba"] + _story(draw, "ab", whole(draw, 6, 9)), 2),
        ([("add", "a"), *_story(draw, "ab", 7), ("end", "a"), *_story(draw, "bc", 6)], 2),
        (_story(draw, "abcd", whole(draw, 20, 24), ends=6), 1),
        (_story(draw, "abcd", whole(draw, 30, 36), ends=6), whole(draw, 2, 3)),
    ]


def _from_the_end(events, block):
    return [(page, slot) for slot, page in _place(events, block)]


def _slips(places, events, block):
    """What is wrong with (page, slot) of the tokens, as words."""
    written, found, added = {}, set(), iter(places.tolist())  # text -> its places
    for what, text in events:
        if what == "end":
            written.pop(text, None)
            continue
        page, slot = next(added)
        mine, others = (
            written.setdefault(text, []),
            {name: held for name, held in written.items() if name != text},
        )
        taken = {page for held in others.values() for page, _ in held}
        pages = [page for page, _ in mine]
        found |= {"slot"} if not 0 <= slot < block else set()
        found |= {"shared"} if page in taken else set()
        found |= {"twice"} if (page, slot) in mine else set()
        if page in pages:
            found |= {"order"} if slot != pages.count(page) else set()
        else:
            found |= {"early"} if len(mine) % block else set()
            free = min(
                number for number in range(len(taken) + len(pages) + 1) if number not in taken | {*pages}
            )
            found |= {"larger"} if page > free else set()
            found |= {"first"} if slot else set()
        mine.append((page, slot))
    return found


place = Exercise(
    "place",
    _place,
    _events,
    {
        "every token gets a page of its own: a page has `block` slots": _pages(full=lambda held, block: True),
        "one page for each text, whatever its length: a full page needs a next one": _pages(
            full=lambda held, block: False, slot=lambda held, block: held
        ),
        "a full page is written again from slot 0, over its tokens: take another page": _pages(
            full=lambda held, block: False
        ),
        "the next page comes a token too late: with `block` tokens held the page is full": _pages(
            full=lambda held, block: held > block and held % block == 1, slot=lambda held, block: held % block
        ),
        "slots are counted from 0 in every page": _pages(slot=lambda held, block: held % block + 1),
        "that is the number of the token in its text: its slot is the remainder by `block`": _pages(
            slot=lambda held, block: held
        ),
        "texts share a page here: a page belongs to one text": _pages(shared=True),
        "only the pages of the text that ended last are free: those of the others are, too": _pages(
            loses=True
        ),
        "the pages of a text that has ended are never used again: they are free": _pages(
            back=lambda pages: []
        ),
        "only the last page of an ended text is free again: all of its pages are": _pages(
            back=lambda pages: pages[-1:]
        ),
        "only the first page of an ended text is free again: all of its pages are": _pages(
            back=lambda pages: pages[:1]
        ),
        "you take the free page with the largest number: take the smallest": _pages(take=max),
        "you take the page that was freed last: take the one with the smallest number": _pages(
            take=lambda free: free[-1]
        ),
        "you take the page that was freed first: take the one with the smallest number": _pages(
            take=lambda free: free[0]
        ),
        "a text that ends keeps its length and pages: it has none when its name comes again": _pages(
            forgets=False
        ),
        "page and slot are exchanged: the order is (page, slot)": _from_the_end,
        "those are the pages alone: return pairs (page, slot)": (
            lambda events, block: [page for page, _ in _place(events, block)]
        ),
        "those are the slots alone: return pairs (page, slot)": (
            lambda events, block: [slot for _, slot in _place(events, block)]
        ),
        "every page is too large by 1: pages are counted from 0": (
            lambda events, block: [(page + 1, slot) for page, slot in _place(events, block)]
        ),
        "that is one address in the pool, page * block + slot: return pairs (page, slot)": (
            lambda events, block: [page * block + slot for page, slot in _place(events, block)]
        ),
        "the last token is missing": lambda events, block: _place(events, block)[:-1],
    },
    "no text reserves more than the page that it writes into, and the pages of an ended text serve the next",
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
        "there is no such slot: the slots of a page are 0 to block - 1": lambda r, right, *case: (
            "slot" in _slips(r, *case)
        ),
        "two texts write into one page: a page belongs to one text": lambda r, right, *case: (
            "shared" in _slips(r, *case)
        ),
        "a slot is written twice, and the token in it is lost": lambda r, right, *case: (
            "twice" in _slips(r, *case)
        ),
        "a text takes a page while its last page still has a free slot": lambda r, right, *case: (
            "early" in _slips(r, *case)
        ),
        "the first token in a page must get slot 0": lambda r, right, *case: "first" in _slips(r, *case),
        "the slots of a page must be filled in order": lambda r, right, *case: "order" in _slips(r, *case),
        "a text takes a page, and one with a smaller number is free": lambda r, right, *case: (
            "larger" in _slips(r, *case)
        ),
    },
    shapes={
        "return one place for every token that is added, and none for an end": lambda r, right, events, block: (
            len(r) != len(right)
        ),
        "a place is a pair of numbers, (page, slot)": lambda r, right, *case: True,
    },
)


# 2. The mask of a left-padded window.


def _real_slots(seen, window):
    return [slot >= window - seen for slot in range(window)]


def _windows(draw):
    window = whole(draw, 5, 24)
    return [
        (0, window),
        (whole(draw, 2, window // 2), window),
        (window, window),
        (window + whole(draw, 2, window - 2), window),
        (1, window - 1),
        (2 * window + 1, window),
    ]


real_slots = Exercise(
    "real_slots",
    _real_slots,
    _windows,
    {
        "that is right padding: in a left-padded window the tokens are in the last slots": (
            lambda seen, window: [slot < seen for slot in range(window)]
        ),
        "off by one: the last slot of the padding is True, too": (
            lambda seen, window: [slot >= window - seen - 1 for slot in range(window)]
        ),
        "off by one: the oldest token is masked out": (
            lambda seen, window: [slot > window - seen for slot in range(window)]
        ),
        "True and False are exchanged: padding would be attended to, and tokens would not": (
            lambda seen, window: [slot < window - seen for slot in range(window)]
        ),
        "every slot is True: the padding must be False": lambda seen, window: [True] * window,
        "every slot is False: the tokens must be True": lambda seen, window: [False] * window,
        "only the newest token is True: the earlier ones must be, too": (
            lambda seen, window: [slot == window - 1 and seen > 0 for slot in range(window)]
        ),
        "that is one boolean too many: the mask has `window` of them": (
            lambda seen, window: [slot >= window - seen for slot in range(window + 1)]
        ),
        "the mask has `window` booleans, and yours has `seen`": lambda seen, window: [True] * seen,
        "those are the numbers of the slots: return a mask of True and False": (
            lambda seen, window: list(range(max(0, window - seen), window))
        ),
        "the first slot is always False: once the window is full, it holds a token": (
            lambda seen, window: [slot >= max(1, window - seen) for slot in range(window)]
        ),
        "the mask grows beyond the window: it always has `window` booleans": (
            lambda seen, window: [False] * (window - seen) + [True] * seen
        ),
        "once more tokens came than fit, every slot is False: the window stays full": (
            lambda seen, window: [seen <= window and slot >= window - seen for slot in range(window)]
        ),
        "you compare the slot with `seen`: the first token is in slot window - seen": (
            lambda seen, window: [slot >= seen for slot in range(window)]
        ),
        "that is right padding, and off by one: the tokens are in the last slots": (
            lambda seen, window: [slot <= seen for slot in range(window)]
        ),
        "that is the number of tokens: return a boolean for each slot": (
            lambda seen, window: min(seen, window)
        ),
        "the remainder empties the window again: once it is full, it stays full": (
            lambda seen, window: [slot >= window - seen % window for slot in range(window)]
        ),
    },
    "tokens at the end, and padding before them",
    holds="booleans",
    given=lambda seen, window: [slot >= window - seen - 1 for slot in range(window)],
    signs={
        "a token is masked out, and a slot of padding is True": lambda r, right, *case: (
            (r & ~right).any() and (~r & right).any()
        ),
        "a slot of padding is True": lambda r, right, *case: (r & ~right).any(),
        "the newest token is masked out: it is in the last slot": lambda r, right, *case: not r[-1],
        "a token is masked out": lambda r, right, *case: (~r & right).any(),
    },
    shapes={
        "the mask must have one boolean for each of the `window` slots": lambda r, right, *case: True,
    },
)

# 3. Decide: which policy.

policy = Choice(
    "policy",
    "b",
    {
        "a": "it fits with 1.07 GB, but shifting copies the whole window for every token. These 1.07 GB of copies come on top of the 13.5 GB of weights, and 0.54 GB of memory would save them",
        "b": "1.61 GB of 1.7 fit, and a copy of 1.07 GB is needed once in 1,024 tokens. That is about 1 MB for each token, hardly any work",
        "c": "two windows take 2.15 GB, and 1.7 are left. The copies that they save are not worth another machine",
        "d": "a ring takes 1.07 GB and needs no copy at all, but its engine must accept an index and a mask out of order. This engine reads a contiguous, left-padded tensor",
    },
)
