# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 7: InfiniGen."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "choose": [
        "heads, tokens, d = keys.shape\ns = []\nfor h in range(heads):\n    size = queries[h].abs().sum(0) + keys[h].abs().sum(0)\n"
        "    c = size.argsort(descending=True)[: round(part * d)]\n    s.append(keys[h][:, c] @ guess[h, c] / math.sqrt(d))\n"
        "near = sum(int((row > row.max() - alpha).sum()) for row in s)\nn = min(cap, -(-near // heads))\n"
        "return torch.stack(s).argsort(-1, descending=True)[:, :n]",
        "s = []\nfor g, q, k in zip(guess.numpy(), queries.numpy(), keys.numpy()):\n"
        "    c = np.argsort(-(np.abs(q).sum(0) + np.abs(k).sum(0)))[: round(part * len(g))]\n"
        "    s.append(k[:, c] @ g[c] / np.sqrt(len(g)))\ns = np.stack(s)\n"
        "n = int(min(cap, np.ceil((s > s.max(1, keepdims=True) - alpha).sum(1).mean())))\nreturn np.argsort(-s, axis=1)[:, :n]",
    ],
    "rehearse": [
        "x = inputs[layer - 1]\nx = x / (x.square().mean() + 1e-6).sqrt() * gains[layer]\nreturn weights[layer] @ x",
        "return (norm(inputs[layer - 1], gains[layer])[None] @ weights[layer].T)[0].numpy()",
    ],
}  # fmt: skip
