# ruff: noqa: E501 (a sentence is one line)
"""Chapter 3: static buffers."""

from course.teaching.check.draw import shuffled, whole
from course.teaching.check.exercise import Choice, Exercise
from course.teaching.check.planted import MISTAKES, RIGHT

# 1. A table of pages.


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
    block, long = whole(draw, 3, 5), whole(draw, 11, 13)
    return [
        ([("add", "a")] * block, block),
        ([("add", "a")] * whole(draw, 7, 9), whole(draw, 2, 3)),
        ([("add", text) for text in "aba"] + _story(draw, "ab", whole(draw, 6, 9)), 2),
        ([("add", "a"), *_story(draw, "ab", 7), ("end", "a"), *_story(draw, "bc", 6)], 2),
        (_story(draw, "abcd", whole(draw, 20, 24), ends=6), 1),
        (_story(draw, "abcd", whole(draw, 30, 36), ends=6), whole(draw, 2, 3)),
        ([("add", "a")] * long + [("end", "a")] + [("add", "b")] * long, 1),
    ]


SLIPS = {
    "slot": "there is no such slot: the slots of a page are 0 to block - 1",
    "shared": "two texts write into one page: a page belongs to one text",
    "twice": "a slot is written twice, and the token in it is lost",
    "early": "a text takes a page while its last page still has a free slot",
    "first": "the first token in a page must get slot 0",
    "order": "the slots of a page must be filled in order",
    "larger": "a text begins a page while one with a smaller number is empty: is it free, or was it taken too early?",
}


def _slips(places, events, block):
    """What is wrong with (page, slot) of the tokens, by the keys of SLIPS."""
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
    RIGHT["place"],
    _events,
    MISTAKES["place"],
    "no text reserves more than the page that it writes into, and the pages of an ended text serve the next",
    holds="indices",
    grows=(
        "one text in one page",
        "a text longer than a page",
        "two texts in turn",
        "a text that ends gives its pages back",
        "pages of one token, many texts",
        "a name that comes again",
        "a text of more than ten pages that ends",
    ),
    signs={
        sentence: lambda r, right, *case, slip=slip: slip in _slips(r, *case)
        for slip, sentence in SLIPS.items()
    },
    shapes={
        "return a place for each `add`, and none for an end": lambda r, right, *case: len(r) != len(right),
        "a place is a pair of numbers, (page, slot)": lambda r, right, *case: True,
    },
)


# 2. The mask of a left-padded window.


def _windows(draw):
    window = whole(draw, 5, 24)
    return [
        (0, window),
        (whole(draw, 2, window // 2), window),
        (window, window),
        (window + whole(draw, 2, window - 2), window),
        (1, window - 1),
        (window - whole(draw, 1, 2), window),
        (2 * window + 1, window),
    ]


real_slots = Exercise(
    "real_slots",
    RIGHT["real_slots"],
    _windows,
    MISTAKES["real_slots"],
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
    shapes={"the mask must have one boolean for each of the `window` slots": lambda *case: True},
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
