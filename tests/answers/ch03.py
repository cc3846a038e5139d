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
