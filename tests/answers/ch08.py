# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 8: comparing methods."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "norm_score": [
        "d = (positions[..., :, None] - positions[..., None, :]).abs()\nn = keys.norm(dim=-1)[..., None, :].expand(d.shape)\n"
        "n = torch.where((d <= reach) & (positions >= 0)[..., None, :], n, 1e9).amin(-1)\nscore = 1 / (1 + n)\n"
        "last = positions.max(-1, keepdim=True).values\n"
        "score[(positions < sinks) | (positions > last - recent)] = 9.0\nscore[positions < 0] = -9.0\nreturn score",
        "n, p = np.linalg.norm(keys.numpy(), axis=-1), positions.numpy()\n"
        "far = (np.abs(p[..., :, None] - p[..., None, :]) > reach) | (p < 0)[..., None, :]\n"
        "n = -np.where(far, np.inf, np.broadcast_to(n[..., None, :], far.shape)).min(-1)\n"
        "n[p > p.max(-1, keepdims=True) - recent] = np.inf\nn[p < sinks] = np.inf\nn[p == -1] = -np.inf\nreturn n",
    ],
    "pareto": [
        "return [i for i, (a, s) in enumerate(points)\n"
        "        if all(b < a or t > s or (b, t) == (a, s) for b, t in points)]",
        "a, s = np.array(points, dtype=float).T\n"
        "beats = (a[None] >= a[:, None]) & (s[None] <= s[:, None])\n"
        "beats &= (a[None] != a[:, None]) | (s[None] != s[:, None])\nreturn np.flatnonzero(~beats.any(1))",
    ],
}  # fmt: skip
