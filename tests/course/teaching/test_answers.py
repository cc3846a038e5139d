# ruff: noqa: E501 (an answer stands on its own line)
"""What learners answer, written as they write it: three right answers for every exercise, and wrong ones.

The key holds a table of wrong functions for each exercise; `test_check.py` tries them. Here are answers written
independently of it, as lines of code, with a part of the sentence that each must get.
"""

from __future__ import annotations

import inspect
import math
import textwrap

import numpy as np
import pytest
import torch

from course.teaching.check.exercise import CORRECT, EXERCISES, INCORRECT, Choice

# The body of a function with the exercise's own parameters.
RIGHT = {
    "greedy": [
        "return torch.max(logits[:, -1, :], dim=-1).indices",
        "return [int(row[-1].argmax()) for row in logits]",
        "return np.argmax(logits.numpy()[:, -1], axis=-1)",
        "return logits.argmax(dim=-1)[:, -1]",
        "return logits[:, -1].softmax(-1).topk(1).indices.squeeze(-1)",
    ],
    "decode_flops": [
        "return 24 * l * b * h * h + 4 * l * b * held * h + 2 * b * h * V",
        "per_layer = 8 * b * h**2 + 16 * b * h**2 + 2 * (2 * b * held * h)\nreturn l * per_layer + 2 * b * V * h",
        "return float(2 * b * h * (l * (12 * h + 2 * held) + V))",
        "return torch.tensor(2 * b * h * V + sum(24 * b * h * h + 4 * b * held * h for _ in range(l)))",
    ],
    "append": [
        "return torch.stack([*past.unbind(2), *new.unbind(2)], 2)",
        "return np.concatenate([past.numpy(), new.numpy()], axis=2)",
        "out = past.new_empty(*past.shape[:2], past.shape[2] + new.shape[2], past.shape[3])\n"
        "out[:, :, : past.shape[2]] = past\nout[:, :, past.shape[2] :] = new\nreturn out",
        "return torch.cat((past, new), -2)",
    ],
    "next_position": [
        "return list(range(held, held + new))",
        "return np.arange(held, held + new)",
        "return held + torch.arange(new)",
        "return range(held, held + new)",
        "return (held + i for i in range(new))",
    ],
    "memory": [
        "return layers * kv_heads * head_dim * tokens * batch * bits // 4",
        "values = math.prod([2, layers, kv_heads, head_dim, tokens, batch])\nreturn values * bits / 8",
        "return torch.tensor(2.0 * layers * kv_heads * head_dim * tokens * batch * bits / 8)",
    ],
    "window_start": [
        "places = spare + 1\nreturn appended - appended // places * places",
        "start = 0\nfor _ in range(appended):\n    start = 0 if start == spare else start + 1\nreturn start",
        "return divmod(appended, spare + 1)[1]",
        "return torch.tensor(appended) % (spare + 1)",
    ],
    "real_slots": [
        "return torch.arange(window) >= window - seen",
        "n = min(seen, window)\nreturn [False] * (window - n) + [True] * n",
        "return np.arange(window) + seen >= window",
        "return tuple(window - slot <= seen for slot in range(window))",
    ],
    "quantize": [
        "top = 2 ** (bits - 1) - 1\nreturn (x * top / x.abs().amax(-1, keepdim=True)).round().to(torch.int8)",
        "a = x.numpy()\nreturn np.rint(a / (np.abs(a).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)))",
        "top = 2 ** (bits - 1) - 1\ns = x.abs().max(dim=-1, keepdim=True).values / top\n"
        "return torch.clamp((x / s.clamp_min(1e-8)).round(), -top, top)",
        "top = (1 << bits - 1) - 1\nrows = x.reshape(-1, x.shape[-1])\n"
        "return torch.stack([torch.round(r / (r.abs().max() / top)) for r in rows]).reshape(x.shape)",
    ],
    "unpack": [
        "return torch.cat([packed % 16, packed // 16], dim=-1).int() - 8",
        "p = packed.numpy().astype(int)\nreturn np.concatenate([p & 15, p >> 4], axis=-1) - 8",
        "p = packed.to(torch.int16)\nreturn torch.cat([(p & 0xF) - 8, (p & 0xF0) / 16 - 8], -1)",
    ],
    "sink_slots": [
        "return [i for i in range(tokens) if i < sinks or i >= tokens - budget + sinks]",
        "return torch.cat([torch.arange(sinks), torch.arange(tokens - budget + sinks, tokens)])",
        "slots = np.arange(tokens)\nreturn np.delete(slots, slice(sinks, tokens - budget + sinks))",
        "return set(range(sinks)) | set(range(tokens - (budget - sinks), tokens))",
    ],
    "heavy_hitters": [
        "w = len(received) - recent\nheavy = torch.argsort(received[:w], descending=True)[: budget - recent]\n"
        "return torch.cat([heavy.sort().values, torch.arange(w, len(received))])",
        "r = received.clone()\nr[-recent:] = float('inf')\nreturn r.topk(budget).indices.sort().values",
        "r = received.clone()\nr[-recent:] = float('inf')\nreturn r.topk(budget).indices",
        "w = len(received) - recent\n"
        "return received[:w].topk(budget - recent).indices.tolist() + list(range(w, len(received)))",
        "w = len(received) - recent\nbest = sorted(range(w), key=lambda i: -received[i])\n"
        "return sorted(best[: budget - recent] + list(range(w, len(received))))",
        "w = len(received) - recent\nheavy = np.argsort(-received.numpy()[:w])[: budget - recent]\n"
        "return np.sort(np.append(heavy, np.arange(w, len(received))))",
    ],
    "link_needed": [
        "seconds = step_ms * 1e-3\nreturn tokens * share * per_token / seconds / 10**9",
        "return share * tokens * per_token / step_ms / 1e6",
        "return np.float64(tokens) * per_token * share / (step_ms * 1_000_000)",
    ],
    "schedule": [
        "events = []\nfor i in range(layers):\n    if i == 0:\n        events.append(['ask', 0])\n"
        "    if i < layers - 1:\n        events.append(['ask', i + 1])\n"
        "    events += [['wait', i], ['attend', i]]\nreturn events",
        "yield 'ask', 0\nfor i in range(layers):\n    if i + 1 != layers:\n        yield 'ask', i + 1\n"
        "    yield 'wait', i\n    yield 'attend', i",
        "e = [('ask', 0)]\nfor i in range(1, layers):\n"
        "    e += [('ask', i), ('wait', i - 1), ('attend', i - 1)]\n"
        "return tuple(e + [('wait', layers - 1), ('attend', layers - 1)])",
    ],
    "how_many": [
        "top = scores.max(dim=1, keepdim=True).values\ncounts = (top - scores < alpha).sum(dim=1)\n"
        "return min(math.ceil(counts.float().mean()), cap)",
        "s = scores.numpy()\nn = (s > s.max(-1, keepdims=True) - alpha).sum() / len(s)\n"
        "return int(np.ceil(min(n, cap)))",
        "total = sum(sum(1 for v in row if v > max(row) - alpha) for row in scores.tolist())\n"
        "return min(cap, -(-total // scores.shape[0]))",
        "near = scores > scores.amax(-1, True) - alpha\nreturn torch.ceil(near.sum(-1).double().mean()).clamp(max=cap)",
    ],
    "rehearse": [
        "x = inputs[layer - 1]\nx = x / (x.square().mean() + 1e-6).sqrt() * gains[layer]\nreturn weights[layer] @ x",
        "x = norm(inputs[layer - 1], gains[layer])\nreturn (weights[layer] * x).sum(-1)",
        "return torch.nn.functional.linear(norm(inputs[layer - 1], gains[layer]), weights[layer])",
        "return (norm(inputs[layer - 1], gains[layer])[None] @ weights[layer].T)[0].numpy()",
    ],
    "norm_score": [
        "return 1 / keys.norm(dim=-1)",
        "return -(keys**2).sum(-1)",
        "return torch.exp(-keys.norm(dim=-1))",
        "return -np.linalg.norm(keys.numpy(), axis=-1)",
        "return keys.norm(dim=-1).argsort(-1, descending=True).argsort(-1)",
    ],
    "pareto": [
        "return [i for i, (a, s) in enumerate(points)\n"
        "        if all(b < a or t > s or (b, t) == (a, s) for b, t in points)]",
        "keep = set()\nfor i, p in enumerate(points):\n    if not any(q != p and q[0] >= p[0] and q[1] <= p[1] "
        "for q in points):\n        keep.add(i)\nreturn keep",
        "a, s = np.array(points, dtype=float).T\n"
        "beats = (a[None] >= a[:, None]) & (s[None] <= s[:, None])\n"
        "beats &= (a[None] != a[:, None]) | (s[None] != s[:, None])\nreturn np.flatnonzero(~beats.any(1))",
        "good = []\nfor p in sorted(points, key=lambda p: (p[1], -p[0])):\n"
        "    if not good or p[0] > good[-1][0] or p == good[-1]:\n        good.append(p)\n"
        "return [i for i, p in enumerate(points) if p in good][::-1]",
    ],
    "fetch_pages": [
        "b = torch.stack([torch.where(query > 0, query * p.max(0).values, query * p.min(0).values).sum()\n"
        "                 for p in keys.split(page)])\nreturn b.topk(count).indices",
        "n = math.ceil(len(keys) / page)\nb = []\nfor i in range(n):\n    p = keys[i * page : (i + 1) * page]\n"
        "    lo, hi = p.amin(0), p.amax(0)\n    b.append(float(query.clamp(min=0) @ hi + query.clamp(max=0) @ lo))\n"
        "return sorted(sorted(range(n), key=lambda i: -b[i])[:count])",
        "b = [(query * p).amax(0).sum() for p in keys.split(page)]\n"
        "return set(torch.tensor(b).argsort(descending=True)[:count].tolist())",
        "k, q = keys.numpy(), query.numpy()\n"
        "b = [np.maximum(q * k[i : i + page].min(0), q * k[i : i + page].max(0)).sum() for i in range(0, len(k), page)]\n"
        "return np.argsort(b)[::-1][:count].copy()",
    ],
    "head_counts": [
        "held = scores >= scores.flatten().topk(total).values.min()\nreturn held.sum(-1)",
        "order = sorted(((float(x), h) for h, row in enumerate(scores) for x in row), reverse=True)[:total]\n"
        "return [sum(h == head for _, h in order) for head in range(len(scores))]",
        "best = np.argsort(-scores.numpy().ravel())[:total]\n"
        "return np.bincount(best // scores.shape[1], minlength=len(scores))",
        "rows, _ = np.unravel_index(scores.flatten().argsort(descending=True)[:total].numpy(), tuple(scores.shape))\n"
        "return [int((rows == h).sum()) for h in range(len(scores))]",
    ],
}  # fmt: skip

WRONG = {
    "greedy": [
        ("return logits.argmax()", "every row"),
        ("return logits[:, -1].float().argmax(-1).float()", "whole numbers"),
        ("return logits[:, :, -1].argmax(-1)", "last entry of the vocabulary"),
        ("logits[:, -1].argmax(-1)", "returns nothing"),
        ("print(logits[:, -1].argmax(-1))", "returns nothing"),
        ("return logits[-1, :].argmax(-1)", "last row of the batch"),
        ("return logits[:, -1].amax(-1)", "value of the largest logit"),
        ("return logits[:, -1, :].max(-1)", "values and indices"),
        ("return logit[:, -1].argmax(-1)", "NameError"),
        ("return logits[:, -1].argmax(2)", "it stops with IndexError"),
        ("return logits", "unchanged"),
        ("return logits[-1]", "all logits of the last row"),
        ("return logits[0] + 0.5", "shape"),
        ("return logits[:, -1].argmax", "brackets"),
    ],
    "decode_flops": [
        ("return l * (12 * b * h**2 + 4 * b * held * h) + 2 * b * h * V", "24bh², not 12"),
        ("return l * 24 * b * h**2 + 4 * b * held * h + 2 * b * h * V", "brackets after l are missing"),
        ("return l * (24 * b * h**2 + 4 * b * h * held) + 2 * b * h * V * h", "logits term has a factor h too many"),
        ("return 24 * l * b * h * h + 4 * l * b * (h + held) + 2 * b * h * V", "lost its factor h"),
        ("return l * (24 * b * h * h + 4 * b * h + 4 * b * held * h) + 2 * b * h * V", "held counts the new token"),
        ("return l * (24 * b * h * h + 4 * b * held * h)", "logits are missing"),
        ("return 12 * l * b * h * h + 2 * l * b * held * h + b * h * V", "one operation"),
        ("return -(l * (24 * b * h**2 + 4 * b * held * h) + 2 * b * h * V)", "sign is turned"),
        ("return l * (24 * b * h ^ 2 + 4 * b * held * h) + 2 * b * h * V", "no power"),
    ],
    "append": [
        ("past[:, :, -new.shape[2]:] = new\nreturn past", "overwrote the last slot"),
        ("return torch.cat([past, new])", "dimension 0"),
        ("return torch.cat([past, new], dim=-1)", "dimension 3"),
        ("return torch.cat(past, new, dim=2)", "TypeError"),
        ("return past.append(new)", "no such method"),
        ("return torch.cat([past, new], dim=4)", "IndexError"),
        ("past += 1\nreturn torch.cat([past - 1, new], dim=2)", "in place"),
        ("return past + new", "stands beside them"),
        ("return [past, new]", "expected one tensor"),
        ("return torch.cat([past, new], dim=2)[:, :, 1:]", "no longer than before"),
    ],
    "next_position": [
        ("return list(range(new))", "does not advance"),
        ("return torch.arange(held + 1, held + 1 + new)", "not 7"),
        ("return torch.linspace(held, held + new - 1, new)", "not floats"),
        ("return torch.arange(float(held), held + new)", "not floats"),
        ("return [held] * new", "one position for all"),
        ("return torch.cat([held, new], dim=2)", "`append`"),
        ("return held, held + new", "two ends"),
    ],
    "memory": [
        ("return layers * kv_heads * head_dim * tokens * batch * bits / 8", "forgot the values"),
        ("return 2 * layers * kv_heads * head_dim * tokens * batch * bits / 8 / 1e9", "in GB"),
        ("return 2 * layers * kv_heads * head_dim * tokens * batch * (bits // 8)", "0 for 4 bits"),
        ("return 2 * layers * heads * head_dim * tokens * batch * bits / 8", "NameError"),
        ("return 2 * layers * kv_heads * head_dim * tokens * bits / 8", "forgot the batch"),
        ("return 5 * layers * kv_heads * head_dim * tokens * batch * bits / 8", "a factor is wrong"),
        ("return 2 * layers * kv_heads * head_dim * tokens * batch * bits / 0", "divisor becomes 0"),
        ("return f'{2 * layers * kv_heads * head_dim * tokens * batch * bits / 8} bytes'", "returns a str"),
    ],
    "window_start": [
        ("return appended % spare", "off by one: with `spare`"),
        ("return float(appended % (spare + 1))", "not floats"),
        ("return appended / (spare + 1)", "whole number"),
        ("return appended", "never comes back"),
        ("return -(appended % (spare + 1))", "a row before the buffer"),
        ("return appended % spare + 1", "binds before"),
        ("return (appended % (spare + 1),) * 2", "shape"),
    ],
    "real_slots": [
        ("return [int(s >= window - seen) for s in range(window)]", "True and False"),
        ("return torch.arange(window) < seen", "right padding"),
        ("return [s > window - seen for s in range(window)]", "oldest token is masked"),
        ("return torch.ones(window).bool()", "mask is forgotten"),
        ("return [s >= window - seen for s in range(1, window + 1)]", "one slot of padding"),
        ("mask = [False] * window\nfor s in range(seen):\n    mask[window - 1 - s] = True\nreturn mask", "IndexError"),
    ],
    "quantize": [
        ("return torch.round(x / (x.abs().amax() / (2 ** (bits - 1) - 1)))", "whole tensor"),
        ("return (x / (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1))).int()", "cut off"),
        ("return torch.round(x / (x.abs().max(-1, keepdim=True) / (2 ** (bits - 1) - 1)))", "two tensors here"),
        ("x /= x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)\nreturn x.round()", "in place"),
        ("return torch.round(x / (x.abs().amax(-1) / (2 ** (bits - 1) - 1)))", "it stops with RuntimeError"),
        ("return x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)", "those are the scales"),
        ("return (x / x.abs().amax(-1, keepdim=True) * (2 ** (bits - 1) - 1)).to(torch.int8)", "up to a whole one: round"),
        ("return -torch.round(x / (x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)))", "sign"),
        ("return torch.round(x / (x.abs().amax(-1, keepdim=True) / 2 ** bits))", "not 2^bits"),
        ("return torch.round(x / (x.abs().amax(-1, keepdim=True) / 7))", "7 is the largest code of 4 bits only"),
        ("return torch.round(x / (x.abs().max() / 7)).int()", "the line for one token in 4 bits"),
        ("s = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)\nreturn torch.round(x / s), s", "the codes only"),
        ("s = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)\nreturn s.shape, s, torch.round(x / s)",
         "you return 3 things, and number 3 is right: return it alone"),
        ("return torch.round(x / (x.abs().amax(-1, keepdim=True) / (2 ^ (bits - 1) - 1)))", "write ** (2**3 is 8)"),
    ],
    "unpack": [
        ("return torch.cat([packed & 15, packed & 240], dim=-1).to(torch.int8) - 8", "still holds the low bits"),
        ("return torch.cat([packed >> 4, packed & 15], dim=-1).to(torch.int8) - 8", "exchanged"),
        ("return torch.cat([packed & 15, packed >> 4], dim=-1).to(torch.int8)", "subtract 8"),
        ("return torch.cat([packed & 15, packed >> 4], dim=-1) - 8", "wrap around"),
        ("packed -= 8\nreturn torch.cat([packed & 15, packed >> 4], dim=-1)", "in place"),
        ("return torch.cat([packed & 15, packed / 16], dim=-1) - 8", "kept the fraction"),
        ("return torch.cat([packed & 15, packed >> 4], dim=0).to(torch.int8) - 8", "first dimension"),
        ("return torch.cat([packed & 15, packed >> 8], dim=-1).to(torch.int8) - 8", "shifted by eight"),
        ("return torch.cat([packed & 15, packed << 4], dim=-1).to(torch.int8) - 8", "shifted to the left"),
        ("return torch.cat([packed % 15, packed // 15], dim=-1).to(torch.int8) - 8", "% 16 and // 16"),
        ("return torch.cat([packed % 15, packed >> 4], dim=-1).to(torch.int8) - 8", "% 15 is not & 15"),
        ("return torch.cat([packed & 15, packed // 15], dim=-1).to(torch.int8) - 8", "// 15 is not >> 4"),
        ("return [[b % 16 - 8 for b in row] + [b // 16 - 8 for b in row] for row in packed.tolist()]",
         "are there fewer dimensions?"),
    ],
    "sink_slots": [
        ("return [*range(sinks), *range(tokens - 1 - (budget - sinks), tokens - 1)]", "newest"),
        ("return list(range(sinks)) + list(range(tokens - budget, tokens))", "on top of the budget"),
        ("return [float(i) for i in range(tokens) if i < sinks or i >= tokens - budget + sinks]", "not floats"),
        ("return [i < sinks or i >= tokens - budget + sinks for i in range(tokens)]", "that is a mask"),
        ("return range(sinks) + range(tokens - (budget - sinks), tokens)", "list(range(...)) + list(range(...))"),
        ("return list(range(4)) + list(range(tokens - (budget - 4), tokens))", "`sinks` is not used: four"),
        ("return list(range(4)) + list(range(tokens - (budget - sinks), tokens))", "only for the window"),
        ("return list(range(1, sinks + 1)) + list(range(tokens - (budget - sinks) + 1, tokens + 1))",
         "counted from 0, to tokens - 1"),
        ("s = list(range(tokens))\nreturn s[:sinks] + s[-(budget - sinks):]", "[-0:] is the whole list"),
        ("return list(range(sinks)).extend(range(tokens - (budget - sinks), tokens))", "returns nothing"),
        ("return [list(range(sinks)), list(range(tokens - (budget - sinks), tokens))]", "two lists"),
    ],
    "heavy_hitters": [
        (
            "return received[-recent:].topk(budget - recent).indices",
            "topk is asked for more numbers than there are",
        ),
        ("return sorted(received.topk(budget).indices.tolist())", "recent window is missing"),
        ("w = len(received) - recent\nheavy = received[w:].topk(budget - recent).indices\n"
         "return sorted(set(heavy.tolist()) | set(range(w, len(received))))", "is the window itself"),
        ("w = len(received) - recent\nheavy = received[w:].topk(budget - recent).indices + w\n"
         "return sorted(set(heavy.tolist()) | set(range(w, len(received))))", "may also be too short"),
        ("w = len(received) - recent\nheavy = received[recent:].topk(budget - recent).indices\n"
         "return sorted(set(heavy.tolist()) | set(range(w, len(received))))", "lacks the first slots"),
        ("return list(range(len(received) - budget, len(received)))", "only the window is left"),
        ("received[-recent:] = 9e9\nreturn received.topk(budget).indices.sort().values", "in place"),
        ("r = received.clone()\nr[-recent:] += 1\nreturn sorted(r.topk(budget).indices.tolist())", "larger than 1"),
        ("r = received.clone()\nr[-recent:] += 100 * r.max()\nreturn r.topk(budget, largest=False).indices",
         "recent slot is missing"),
        ("w = len(received) - recent\nh = received[:w].topk(budget - recent).indices.sort().values.float()\n"
         "return torch.cat([h, torch.arange(w, len(received)).float()])", "not floats"),
        ("w = len(received) - recent\nh = received[:w].topk(budget - recent).values\n"
         "return sorted(set(h.tolist()) | set(range(w, len(received))))", "not floats"),
        ("w = len(received) - recent\nh = received[:w].topk(budget).indices\n"
         "return sorted(set(h.tolist()) | set(range(w, len(received))))", "window on top"),
    ],
    "link_needed": [
        ("return share * tokens * per_token / step_ms / 1e9", "milliseconds"),
        ("return tokens * per_token / (step_ms / 1000) / 1e9", "share is missing"),
        ("return share * tokens * per_token / (step_ms / 1000) / 1024**3", "GiB"),
        ("return share * tokens * per_token / (step_ms / 1000)", "bytes per second"),
        ("return share * tokens * per_token * 8 / (step_ms / 1000) / 1e9", "gigabits"),
        ("return share * tokens * per_token / (step_ms * 1000) / 1e9", "do not multiply"),
        ("return share * tokens * per_token / ms / 1e9", "NameError"),
        ("return share * tokens * per_token // step_ms // 1e6", "cuts off"),
    ],
    "schedule": [
        ("e = [('ask', 0)]\nfor i in range(layers):\n    e += [('wait', i), ('ask', i + 1), ('attend', i)]\nreturn e",
         "does not exist"),
        ("e = [('ask', i) for i in range(layers)]\nfor i in range(layers):\n    e += [('wait', i), ('attend', i)]\n"
         "return e", "whole cache again"),
        ("e = [('ask', 0)]\nfor i in range(layers - 1):\n    e += [('ask', i + 1), ('wait', i), ('attend', i)]\n"
         "return e", "never attends"),
        ("for i in range(layers):\n    e = [('ask', i), ('wait', i), ('attend', i)]\nreturn e", "begins anew"),
        ("return [('ask', i // 3) for i in range(3 * layers)]", "asked for twice"),
        ("e = ['ask', 0]\nfor i in range(layers):\n    e += ['wait', i, 'attend', i]\nreturn e", "one event is a pair"),
    ],
    "how_many": [
        ("return min(cap, math.ceil((scores > scores.max() - alpha).sum() / len(scores)))", "one maximum for all"),
        ("near = scores > scores.amax(-1, keepdim=True) - alpha\nreturn min(cap, int(near.sum(-1).float().mean()))",
         "rounded down"),
        ("near = scores > scores.amax(-1, keepdim=True) - alpha\nreturn math.ceil(near.sum(-1).float().mean())",
         "cap is missing"),
        ("near = scores > scores.amax(-1, keepdim=True) - alpha\nreturn min(cap, math.ceil(near.sum(-1).mean()))",
         "it stops with RuntimeError"),
        ("near = scores > scores.amax(-1) - alpha\nreturn min(cap, math.ceil(near.sum(-1).float().mean()))",
         "it stops with RuntimeError"),
        ("return min(cap, int((scores > scores.amax(-1, keepdim=True) - alpha).sum()))", "added the heads up"),
        ("scores -= scores.amax(-1, keepdim=True)\nreturn min(cap, math.ceil((scores > -alpha).sum(-1).float().mean()))",
         "in place"),
    ],
    "rehearse": [
        ("return weights[layer - 1] @ norm(inputs[layer - 1], gains[layer])", "W_q belongs to the layer before"),
        ("return weights[layer] @ norm(inputs[layer], gains[layer])", "not known yet"),
        ("return weights[layer] @ inputs[layer - 1]", "norm is missing"),
        ("return weights[layer] @ (inputs[layer - 1] * gains[layer])", "only the gain is there"),
        ("return norm(inputs[layer - 1], gains[layer]) @ weights[layer]", "transposed"),
        ("return weights[layer] * norm(inputs[layer - 1], gains[layer])", "element by element"),
        ("return weights[layer + 1] @ norm(inputs[layer - 1], gains[layer])", "it stops with IndexError"),
        ("return -weights[layer] @ norm(inputs[layer - 1], gains[layer])", "sign is turned"),
    ],
    "norm_score": [
        ("return (keys**2).sum(-1)", "largest norm"),
        ("n = keys.norm(dim=-1)\nreturn n < n.mean()", "that is a mask"),
        ("n = keys.norm(dim=-1)\nreturn (n <= n.median()).float()", "that is a mask"),
        ("return (-keys.norm(dim=-1)).round()", "do not round"),
        ("return -keys.norm(dim=-1).int()", "do not round"),
        ("return 1 / keys.norm(dim=-2)", "each channel"),
        ("return -keys.sum(-1)", "cancel"),
        ("return -keys.norm(dim=-1, keepdim=True)", "no keepdim"),
        ("return keys.norm(dim=-1).argsort(-1)", "in order of their norm"),
        ("keys /= 2\nreturn -keys.norm(dim=-1)", "in place"),
        ("return -keys.norm(-1)", "one number for all keys"),
        ("return (-keys.norm(dim=-1)).topk(3).indices", "shape"),
        ("return torch.log(-keys.norm(dim=-1))", "NaN"),
    ],
    "pareto": [
        ("return [i for i, (a, s) in enumerate(points) if not any(b > a and t < s for b, t in points)]", "as accurate"),
        ("return [i for i, (a, s) in enumerate(points) if not any(b >= a and t <= s for b, t in points)]",
         "beat itself"),
        ("return [p for p in points if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]",
         "points themselves"),
        ("return [i for i, p in enumerate(points) if any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]",
         "those are the methods that are beaten"),
        ("points.sort()\nreturn [i for i, p in enumerate(points)"
         " if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]", "in place"),
        ("return max(range(len(points)), key=lambda i: points[i][0])", "only the most accurate"),
        ("return [float(i) for i, p in enumerate(points)"
         " if not any(q != p and q[0] >= p[0] and q[1] <= p[1] for q in points)]", "not floats"),
    ],
    "fetch_pages": [
        ("b = torch.stack([(query * p.max(0).values).sum() for p in keys.split(page)])\nreturn b.topk(count).indices", "only the largest values"),
        ("b = torch.stack([torch.maximum(query * p.min(0).values, query * p.max(0).values).sum() for p in keys.split(page)])\n"
         "return b.topk(count).values", "largest bounds"),
        ("b = torch.stack([(p @ query).max() for p in keys.split(page)])\nreturn b.topk(count).indices", "of the keys themselves"),
        ("p = keys[: len(keys) // page * page].view(-1, page, keys.shape[1])\n"
         "b = torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1)\nreturn b.topk(min(count, len(b))).indices", "the last page is missing"),
        ("b = torch.stack([query @ p.mean(0) for p in keys.split(page)])\nreturn b.topk(count).indices", "a mean is no bound"),
        ("return (keys @ query).topk(count).indices", "asked for are pages"),
        ("b = torch.stack([torch.maximum(query * p.min(0).values, query * p.max(0).values).sum() for p in keys.split(page)])\n"
         "return b.topk(count).indices.float()", "whole numbers"),
        ("torch.stack([query @ p.max(0).values for p in keys.split(page)]).topk(count)", "returns nothing"),
    ],
    "head_counts": [
        ("worth = scores.softmax(-1)\nbest = worth.flatten().topk(total).indices\n"
         "return torch.bincount(best // scores.shape[1], minlength=len(scores))", "a softmax inside each head"),
        ("best = scores.flatten().topk(total).indices\nreturn torch.bincount(best // scores.shape[1]).tolist()", "minlength=heads"),
        ("best = scores.flatten().topk(total).indices\nreturn torch.bincount(best % scores.shape[1], minlength=scores.shape[1])", "each token"),
        ("return [total // len(scores)] * len(scores)", "every head gets the same"),
        ("return scores.flatten().topk(total).indices", "places of the best"),
        ("worth = scores / scores.sum(-1, keepdim=True)\nbest = worth.flatten().topk(total).indices\n"
         "return torch.bincount(best // scores.shape[1], minlength=len(scores))", "divided by their head's sum"),
        ("worth = -scores\nbest = worth.flatten().topk(total).indices\n"
         "return torch.bincount(best // scores.shape[1], minlength=len(scores))", "the lowest scores"),
        ("best = scores.flatten().topk(total).indices\nreturn [float(n) for n in torch.bincount(best // scores.shape[1], minlength=len(scores))]",
         "not floats"),
    ],
}  # fmt: skip

FUNCTIONS = {name: one for name, one in EXERCISES.items() if not isinstance(one, Choice)}
CHOICES = {name: one for name, one in EXERCISES.items() if isinstance(one, Choice)}
UNNAMED = ("case 1", "case 2", "case 3", "case 4", "the results differ")  # a difference, and no mistake


def answer(name: str, body: str):
    """A function with the exercise's parameters and this body."""
    parameters = ", ".join(inspect.signature(FUNCTIONS[name].right).parameters)
    scope = {"torch": torch, "np": np, "math": math, "norm": norm}
    exec(f"def {name}({parameters}):\n{textwrap.indent(body, '    ')}", scope)
    return scope[name]


def norm(x, gain):
    return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * gain


@pytest.mark.parametrize("name, body", [(name, body) for name, bodies in RIGHT.items() for body in bodies])
def test_a_right_answer_written_differently_is_accepted(name, body):
    assert str(FUNCTIONS[name].verdict(answer(name, body))) == f"correct: {FUNCTIONS[name].praise}"


@pytest.mark.parametrize("name, body, told", [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_a_wrong_answer_is_told_its_mistake(name, body, told):
    verdict = FUNCTIONS[name].verdict(answer(name, body))
    assert verdict.state == INCORRECT and told and told in verdict.message, verdict
    assert not verdict.message.startswith(UNNAMED)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_exercise_has_its_three_right_answers_and_its_table_of_eight_mistakes(name):
    assert len(RIGHT[name]) >= 3
    told = {FUNCTIONS[name].verdict(answer(name, body)).message for body, _ in WRONG[name]}
    assert len(told) >= 6 and len(told | set(FUNCTIONS[name].mistakes)) >= 14
    assert len(FUNCTIONS[name].mistakes) >= 8


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_takes_its_letter_however_it_is_written(name):
    right = CHOICES[name].right
    words = ". a method and b the window, for a conversation about c or d"
    for written in (
        right,
        f" {right.upper()} ",
        f"({right})",
        f"{right}.",
        [right],
        right + words,
        f"{right}) a {words}",
    ):
        assert CHOICES[name].verdict(written).state == CORRECT


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_has_eight_sentences_for_wrong_answers(name):
    one = CHOICES[name]
    wrong = [letter for letter in one.why if letter != one.right]
    odd = ["z", 3, ["a", "b"], "a or b", "", lambda: "a", "because it is faster"]
    verdicts = [one.verdict(given) for given in (*wrong, *odd)]
    assert all(verdict.state == INCORRECT for verdict in verdicts)
    assert len({verdict.message for verdict in verdicts}) == len(verdicts) >= 8


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_answer_to_another_exercise_is_told_as_such(name):
    others = [one for one in FUNCTIONS.values() if one.name != name]
    same_number = [
        one for one in others
        if len(inspect.signature(one.right).parameters) == len(inspect.signature(FUNCTIONS[name].right).parameters)
    ]  # fmt: skip
    for other in others:
        message = FUNCTIONS[name].verdict(other.right).message
        if other not in same_number:
            assert "arguments" in message
        else:
            assert f"`{other.name}`" in message or not message.startswith(UNNAMED), message
