# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 3: static buffers."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "place": [
        "pages, count, used, out = {}, {}, set(), []\nfor what, text in events:\n    if what == 'end':\n"
        "        used -= set(pages.pop(text, []))\n        count.pop(text, None)\n        continue\n    n = count.get(text, 0)\n"
        "    if n % block == 0:\n        page = 0\n        while page in used:\n            page += 1\n        used.add(page)\n"
        "        pages.setdefault(text, []).append(page)\n    out.append((pages[text][n // block], n % block))\n"
        "    count[text] = n + 1\nreturn out",
        "owner, out = [], []\nheld = {}\nfor what, text in events:\n    if what == 'end':\n"
        "        owner = [None if o == text else o for o in owner]\n        held[text] = 0\n        continue\n"
        "    n = held.get(text, 0)\n    if n % block == 0:\n        if None not in owner:\n            owner.append(None)\n"
        "        last = owner.index(None)\n        owner[last] = text\n        held[text, 'page'] = last\n"
        "    out.append([held[text, 'page'], n % block])\n    held[text] = n + 1\nreturn out",
        "table, free, made = {}, [], 0\nfor what, text in events:\n    slots = table.setdefault(text, [])\n    if what == 'end':\n"
        "        free = sorted({*free, *(p for p, _ in slots)})\n        table[text] = []\n    elif slots and slots[-1][1] + 1 < block:\n"
        "        slots.append((slots[-1][0], slots[-1][1] + 1))\n        yield slots[-1]\n    else:\n        if not free:\n"
        "            free, made = [made], made + 1\n        slots.append((free.pop(0), 0))\n        yield slots[-1]",
    ],
    "real_slots": [
        "return torch.arange(window) >= window - seen",
        "n = min(seen, window)\nreturn [False] * (window - n) + [True] * n",
        "return np.arange(window) + seen >= window",
        "return tuple(window - slot <= seen for slot in range(window))",
    ],
}  # fmt: skip

# And what must be said of it.
WRONG = {
    "place": [
        ("return [(i // block, i % block) for i, _ in enumerate(events)]", "two texts write into one page"),
        ("out, n = [], {}\nfor what, t in events:\n    if what == 'add':\n        out.append((n.setdefault(t, 0) // block, n[t] % block))\n"
         "        n[t] += 1\nreturn out", "test 3 of 6"),
        ("pages, out, made = {}, [], 0\nfor what, t in events:\n    if what == 'add':\n        n = pages.setdefault(t, [])\n        if len(n) % block == 0:\n"
         "            made += 1\n        n.append(made - 1)\n        out.append((n[-1], (len(n) - 1) % block))\nreturn out", "test 3 of 6"),
        ("for what, text in events:\n    print(what, text)", "returns nothing"),
        ("return [(page, slot) for page, slot in events]", "unchanged"),
        ("table = {}\nfor what, text in events:\n    table[text].append(what)\nreturn table", "it stops with KeyError"),
        ("page = {}\nout = []\nseen = {}\nfor what, t in events:\n    if what == 'end':\n        continue\n    page.setdefault(t, len(page))\n"
         "    seen[t] = seen.get(t, -1) + 1\n    out.append((page[t], seen[t]))\nreturn out", "there is no slot `block`"),
    ],
    "real_slots": [
        ("return [int(s >= window - seen) for s in range(window)]", "True and False"),
        ("mask = [False] * window\nfor s in range(seen):\n    mask[window - 1 - s] = True\nreturn mask", "IndexError"),
    ],
}  # fmt: skip
