# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer in chapter 4: quantization."""

# The body of a function with the exercise's own parameters.
RIGHT = {
    "kivi_keys": [
        "out = k.clone()\nfor b in range(0, len(k) - block + 1, block):\n    for c in range(k.shape[1]):\n        x = k[b : b + block, c]\n"
        "        lo, hi = x.min(), x.max()\n        if hi > lo:\n            step = (hi - lo) / (2**bits - 1)\n"
        "            out[b : b + block, c] = lo + step * ((x - lo) / step).round()\nreturn out",
        "parts = []\nfor x in k.split(block):\n    if len(x) == block:\n        lo, hi = x.aminmax(dim=0)\n        step = (hi - lo) / (2**bits - 1)\n"
        "        codes = torch.where(step > 0, (x - lo) / step, 0).round()\n        x = codes * step + lo\n    parts.append(x)\n"
        "return torch.cat(parts)",
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

# And what must be said of it.
WRONG = {
    "kivi_keys": [
        ("lo, hi = k.amin(0), k.amax(0)\nstep = (hi - lo) / (2**bits - 1)\nreturn ((k - lo) / step).round() * step + lo", "test 2 of 6"),
        ("n = len(k) // block * block\np = k[:n].view(-1, block, k.shape[1])\nlo, hi = p.amin(-1, keepdim=True), p.amax(-1, keepdim=True)\n"
         "s = (hi - lo) / (2**bits - 1)\nreturn torch.cat([(((p - lo) / s).round() * s + lo).view(-1, k.shape[1]), k[n:]])", "for each token"),
        ("n = len(k) // block * block\np = k[:n].view(-1, block, k.shape[1])\nlo, hi = p.amin(1, keepdim=True), p.amax(1, keepdim=True)\n"
         "s = (hi - lo) / (2**bits - 1)\nreturn torch.cat([(((p - lo) / s).round() * s + lo).view(-1, k.shape[1]), k[n:]])", "divides by zero"),
        ("n = len(k) // block * block\np = k[:n].view(-1, block, k.shape[1])\nlo, hi = p.amin(1, keepdim=True), p.amax(1, keepdim=True)\n"
         "s = ((hi - lo) / (2**bits - 1)).clamp_min(1e-9)\nreturn (((p - lo) / s).round() * s + lo).view(-1, k.shape[1])", "last tokens are missing"),
        ("n = len(k) // block * block\np = k[:n].view(-1, block, k.shape[1])\nlo, hi = p.amin(1, keepdim=True), p.amax(1, keepdim=True)\n"
         "s = ((hi - lo) / 2**bits).clamp_min(1e-9)\nreturn torch.cat([(((p - lo) / s).round() * s + lo).view(-1, k.shape[1]), k[n:]])", "divide by the steps"),
        ("p = k.view(-1, block, k.shape[1])\nreturn p.amin(1)", "it stops with RuntimeError"),
        ("lo, hi = k.min(0), k.max(0)\nreturn (k - lo) / (hi - lo)", "two tensors here"),
        ("n = len(k) // block * block\np = k[:n].view(-1, block, k.shape[1])\nlo, hi = p.amin(1, keepdim=True), p.amax(1, keepdim=True)\n"
         "s = ((hi - lo) / (2**bits - 1)).clamp_min(1e-9)\nreturn torch.cat([(((p - lo) / s).int() * s + lo).view(-1, k.shape[1]), k[n:]])", "cut off"),
        ("k -= k.amin(0)\nreturn k", "in place"),
    ],
    "to_codes": [
        ("return (x / step).to(torch.int8)", "the cast cuts off"),
        ("return (x / step).clamp(-largest, largest).int()", "still cut off"),
        ("return (x / step).floor().clamp(-largest, largest)", "rounds down"),
        ("return torch.round(x / step)", "does not exist"),
        ("return torch.round(x / step).clamp(-largest - 1, largest)", "zero lies in the middle"),
        ("return (x / step + 0.5).int().clamp(-largest, largest)", "the wrong way"),
        ("return x / step", "not all of these are whole numbers"),
        ("return torch.round(x * step).clamp(-largest, largest)", "multiplied by the step"),
        ("return (x / step).round().clamp(-largest, largest) + largest", "counted from zero"),
        ("(x / step).round().clamp(-largest, largest)", "returns nothing"),
        ("x /= step\nreturn x.round().clamp(-largest, largest)", "in place"),
        ("return (x / step).round().clamp(largest)", "code beyond `largest`"),
    ],
}  # fmt: skip
