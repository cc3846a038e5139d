# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 1: recompute."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "generate": [
        "done = [False] * len(ids)\nfor _ in range(new):\n    best = model(ids)[:, -1].max(-1).indices.tolist()\n"
        "    best = [end if d else b for d, b in zip(done, best)]\n    done = [d or b == end for d, b in zip(done, best)]\n"
        "    ids = torch.hstack([ids, torch.tensor(best)[:, None]])\n    if all(done):\n        break\nreturn ids",
        "rows = []\nfor row in ids:\n    row, n = row[None], 0\n    while n < new and (n == 0 or row[0, -1] != end):\n"
        "        row, n = torch.cat([row, model(row)[:, -1].argmax(-1, keepdim=True)], 1), n + 1\n    rows.append(row[0].tolist())\n"
        "longest = max(map(len, rows))\nreturn [row + [end] * (longest - len(row)) for row in rows]",
    ],
    "visible": [
        "longest = max(lengths.tolist())\nreturn [[i >= longest - n for i in range(total)] for n in lengths.tolist()]",
        "mask = torch.zeros(len(lengths), total, dtype=torch.bool)\nwritten = total - lengths.max()\n"
        "for row, n in enumerate(lengths):\n    mask[row, -int(n + written):] = True\nreturn mask",
        "pad = lengths.numpy().max() - lengths.numpy()\nreturn np.arange(total)[None, :] >= pad[:, None]",
    ],
}  # fmt: skip
