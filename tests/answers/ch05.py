# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 5: eviction."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "snapkv": [
        "h, t, d = k.shape\nout = []\nfor head in range(h):\n    got = torch.zeros(t)\n    for i in range(t - window, t):\n"
        "        got[: i + 1] += (k[head, : i + 1] @ q[head, i] / math.sqrt(d)).softmax(0)\n"
        "    best = got[: t - window].argsort(descending=True)[: budget - window]\n"
        "    out.append(best.tolist() + list(range(t - window, t)))\nreturn out",
        "h, t, d = k.shape\nplaces = torch.arange(t)\ns = torch.einsum('hwd,htd->hwt', q[:, t - window :], k) * d**-0.5\n"
        "s[:, places[None] > places[-window:, None]] = -math.inf\nmass = s.softmax(-1).mean(1)\nmass[:, t - window :] = 9.0\n"
        "return mass.topk(budget).indices.sort(-1).values",
        "h, t, d = k.shape\nfull = (q @ k.mT / d**0.5).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1)\n"
        "mass = full[:, -window:].sum(1)[:, :-window].numpy()\nbest = np.argsort(-mass, axis=1)[:, : budget - window]\n"
        "return np.concatenate([best, np.tile(np.arange(t - window, t), (h, 1))], axis=1)",
    ],
    "add_up": [
        "out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far\nreturn out",
        "out = received.numpy().copy()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far.numpy()\nreturn out",
    ],
}  # fmt: skip
