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
        "if so_far is None:\n    return received\nmore = received.shape[-1] - so_far.shape[-1]\n"
        "return received + torch.nn.functional.pad(so_far, (0, more))",
        "out = received.numpy().copy()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far.numpy()\nreturn out",
        "old = torch.zeros_like(received)\nif so_far is not None:\n    old[..., : so_far.shape[-1]] = so_far\nreturn old + received",
    ],
}  # fmt: skip

# And what must be said of it.
WRONG = {
    "snapkv": [
        ("return (q[:, -1:] @ k.mT)[:, 0].topk(budget).indices", "window is not whole"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).softmax(-1).sum(1)\nreturn w.topk(budget)", "two tensors here"),
        ("h, t, d = k.shape\nreturn torch.arange(t - budget, t).expand(h, -1).float()", "test 1 of 5"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.T / d**0.5).softmax(-1)\nreturn w", "it stops with RuntimeError"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).masked_fill(torch.ones(window, t).triu(t - window + 1).bool(), -torch.inf)\n"
         "w = w.softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1).double()", "not floats"),
        ("q[:, -window:] @ k.mT", "returns nothing"),
    ],
    "add_up": [
        ("if so_far is None:\n    return received\nreturn so_far + received", "it stops with RuntimeError"),
        ("if so_far is not None:\n    received[..., : so_far.shape[-1]] += so_far\nreturn received", "in place"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far\nprint(out)", "returns nothing"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += 2 * so_far\nreturn out", "another total"),
        ("return received + so_far", "it stops with"),
        ("if so_far is None:\n    return received\nheld = so_far.shape[-1]\n"
         "return torch.cat([so_far + received[..., :held].mean(), received[..., held:]], -1)", "all held tokens grow by the same"),
    ],
}  # fmt: skip
