# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 4: quantization."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "kivi_keys": [
        "out = k.clone()\nfor b in range(0, len(k) - block + 1, block):\n    for c in range(k.shape[1]):\n        x = k[b : b + block, c]\n"
        "        lo, hi = x.min(), x.max()\n        if hi > lo:\n            step = (hi - lo) / (2**bits - 1)\n"
        "            out[b : b + block, c] = lo + step * ((x - lo) / step).round()\nreturn out",
        "a = k.numpy()\nn = len(a) // block * block\nx = a[:n].reshape(-1, block, a.shape[1])\nlo, hi = x.min(1, keepdims=True), x.max(1, keepdims=True)\n"
        "step = np.maximum((hi - lo) / (2**bits - 1), 1e-20)\nread = np.rint((x - lo) / step) * step + lo\n"
        "return np.concatenate([read.reshape(n, -1) if n else a[:0], a[n:]])",
    ],
    "to_codes": [
        "return torch.clamp(torch.round(x / step), -largest, largest)",
        "return np.clip(np.rint((x / step).numpy()), -largest, largest)",
        "return [[max(-largest, min(largest, round(float(v / s)))) for v in row] for row, s in zip(x, step)]",
        "return (x / step).clamp(-largest, largest).round().int()",
    ],
}  # fmt: skip
