# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 9: page bounds, ragged heads, and which method for whom."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "quest_step": [
        "out = []\nfor q, k, v in zip(query, keys, values):\n    pages = list(zip(k.split(page), v.split(page)))\n"
        "    bound = [float(torch.where(q > 0, q * rows.amax(0), q * rows.amin(0)).sum()) for rows, _ in pages]\n"
        "    best = sorted(range(len(pages)), key=lambda i: -bound[i])[:count]\n"
        "    k, v = (torch.cat([pages[i][n] for i in best]) for n in (0, 1))\n"
        "    out.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)\nreturn torch.stack(out)",
        "b = np.stack([(query[:, None] * p).amax(1).sum(-1).numpy() for p in keys.split(page, 1)], 1)\n"
        "best = np.argsort(-b, axis=1)[:, :count]\ns = torch.einsum('hd,htd->ht', query, keys).numpy() / np.sqrt(query.shape[1])\n"
        "w = np.exp(s - s.max())\nfor head, row in enumerate(w):\n    row[[t for t in range(len(row)) if t // page not in best[head]]] = 0\n"
        "return np.einsum('ht,htd->hd', w / w.sum(1, keepdims=True), values.numpy())",
    ],
    "head_counts": [
        "order = sorted(((float(x), h) for h, row in enumerate(scores) for x in row), reverse=True)[:total]\n"
        "return [sum(h == head for _, h in order) for head in range(len(scores))]",
        "best = np.argsort(-scores.numpy().ravel())[:total]\n"
        "return np.bincount(best // scores.shape[1], minlength=len(scores))",
    ],
}  # fmt: skip
