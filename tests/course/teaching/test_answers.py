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

pytestmark = pytest.mark.uncounted

# The body of a function with the exercise's own parameters.
RIGHT = {
    "generate": [
        "done = [False] * len(ids)\nfor _ in range(new):\n    best = model(ids)[:, -1].max(-1).indices.tolist()\n"
        "    best = [end if d else b for d, b in zip(done, best)]\n    done = [d or b == end for d, b in zip(done, best)]\n"
        "    ids = torch.hstack([ids, torch.tensor(best)[:, None]])\n    if all(done):\n        break\nreturn ids",
        "first = ids.shape[1]\nwhile ids.shape[1] < first + new:\n    over = (ids[:, first:] == end).any(1)\n"
        "    if over.all():\n        return ids\n    now = model(ids).argmax(-1)[:, -1]\n    now[over] = end\n"
        "    ids = torch.cat([ids, now.unsqueeze(1)], 1)\nreturn ids",
        "rows = []\nfor row in ids:\n    row, n = row[None], 0\n    while n < new and (n == 0 or row[0, -1] != end):\n"
        "        row, n = torch.cat([row, model(row)[:, -1].argmax(-1, keepdim=True)], 1), n + 1\n    rows.append(row[0].tolist())\n"
        "longest = max(map(len, rows))\nreturn [row + [end] * (longest - len(row)) for row in rows]",
    ],
    "attend_step": [
        "K, V = torch.cat([K, torch.einsum('nh,khd->knd', x, w_k)], 1), torch.cat([V, torch.einsum('nh,khd->knd', x, w_v)], 1)\n"
        "out = []\ntimes = len(w_q) // len(w_k)\nfor head, w in enumerate(w_q):\n    rows = []\n    for i, token in enumerate(x):\n"
        "        upto = K.shape[1] - len(x) + i + 1\n        k, v = K[head // times, :upto], V[head // times, :upto]\n"
        "        rows.append((k @ (token @ w) / k.shape[-1] ** 0.5).softmax(0) @ v)\n    out.append(torch.stack(rows))\n"
        "return torch.stack(out), K, V",
        "K, V = torch.cat((K, x @ w_k), 1), torch.cat((V, x @ w_v), 1)\nn, t = len(x), K.shape[1]\n"
        "seen = torch.arange(t)[None] <= torch.arange(t - n, t)[:, None]\n"
        "q = (x @ w_q).unflatten(0, (len(w_k), -1))\n"
        "s = (q @ K[:, None].mT / math.sqrt(K.shape[-1])).where(seen, torch.tensor(-math.inf))\n"
        "return [(s.softmax(-1) @ V[:, None]).flatten(0, 1), K, V]",
        "K, V = torch.cat((K, x @ w_k), 1), torch.cat((V, x @ w_v), 1)\nn, t = len(x), K.shape[1]\n"
        "mask = torch.ones(n, t).tril(t - n).bool()\ng = len(w_q) // len(w_k)\n"
        "out = torch.nn.functional.scaled_dot_product_attention(x @ w_q, K.repeat_interleave(g, 0), V.repeat_interleave(g, 0), mask)\n"
        "return out, K, V",
    ],
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
    "step_seconds": [
        "arrive, leave = [], []\nfor i, (c, t) in enumerate(zip(compute, transfer)):\n"
        "    begin = max(arrive[-1:] + ([leave[i - buffers]] if i >= buffers else []) + [0])\n    arrive.append(begin + t)\n"
        "    leave.append(max(leave[-1:] + [arrive[-1]]) + c)\nreturn leave[-1]",
        "def ready(i):\n    before = ready(i - 1) if i else 0\n    return max(before, over(i - buffers) if i >= buffers else 0) + transfer[i]\n"
        "def over(i):\n    return max(ready(i), over(i - 1) if i else 0) + compute[i]\nreturn float(over(len(compute) - 1))",
        "done = [0.0] * buffers\nlink = 0.0\nfor c, t in zip(compute, transfer):\n    link = max(link, done[-buffers]) + t\n"
        "    done.append(max(link, done[-1]) + c)\nreturn np.float64(done[-1])",
    ],
    "choose": [
        "heads, tokens, d = keys.shape\ns = []\nfor h in range(heads):\n    size = queries[h].abs().sum(0) + keys[h].abs().sum(0)\n"
        "    c = size.argsort(descending=True)[: round(part * d)]\n    s.append(keys[h][:, c] @ guess[h, c] / math.sqrt(d))\n"
        "near = sum(int((row > row.max() - alpha).sum()) for row in s)\nn = min(cap, -(-near // heads))\n"
        "return torch.stack(s).argsort(-1, descending=True)[:, :n]",
        "d = keys.shape[-1]\nsize = torch.cat([queries, keys], 1).abs().mean(1)\n"
        "mask = torch.zeros_like(guess).scatter(1, size.topk(round(part * d)).indices, 1.0)\n"
        "s = torch.einsum('hd,htd->ht', guess * mask, keys) * d**-0.5\n"
        "near = (s.max(1, keepdim=True).values - s < alpha).sum() / len(s)\n"
        "return s.topk(min(cap, math.ceil(near))).indices.sort(-1).values",
        "s = []\nfor g, q, k in zip(guess.numpy(), queries.numpy(), keys.numpy()):\n"
        "    c = np.argsort(-(np.abs(q).sum(0) + np.abs(k).sum(0)))[: round(part * len(g))]\n"
        "    s.append(k[:, c] @ g[c] / np.sqrt(len(g)))\ns = np.stack(s)\n"
        "n = int(min(cap, np.ceil((s > s.max(1, keepdims=True) - alpha).sum(1).mean())))\nreturn np.argsort(-s, axis=1)[:, :n]",
    ],
    "norm_score": [
        "d = (positions[..., :, None] - positions[..., None, :]).abs()\nn = keys.norm(dim=-1)[..., None, :].expand(d.shape)\n"
        "n = torch.where((d <= reach) & (positions >= 0)[..., None, :], n, 1e9).amin(-1)\nscore = 1 / (1 + n)\n"
        "last = positions.max(-1, keepdim=True).values\n"
        "score[(positions < sinks) | (positions > last - recent)] = 9.0\nscore[positions < 0] = -9.0\nreturn score",
        "b, h, s, _ = keys.shape\nout = torch.zeros(b, h, s)\nfor i in range(b):\n    for j in range(h):\n"
        "        p, n = positions[i, j].tolist(), keys[i, j].norm(dim=-1).tolist()\n        for k in range(s):\n"
        "            near = [n[m] for m in range(s) if p[m] >= 0 and abs(p[m] - p[k]) <= reach]\n"
        "            safe = p[k] < sinks or p[k] > max(p) - recent\n"
        "            out[i, j, k] = -1e9 if p[k] < 0 else 1e9 if safe else -min(near)\nreturn out",
        "n, p = np.linalg.norm(keys.numpy(), axis=-1), positions.numpy()\n"
        "far = (np.abs(p[..., :, None] - p[..., None, :]) > reach) | (p < 0)[..., None, :]\n"
        "n = -np.where(far, np.inf, np.broadcast_to(n[..., None, :], far.shape)).min(-1)\n"
        "n[p > p.max(-1, keepdims=True) - recent] = np.inf\nn[p < sinks] = np.inf\nn[p == -1] = -np.inf\nreturn n",
    ],
    "visible": [
        "longest = max(lengths.tolist())\nreturn [[i >= longest - n for i in range(total)] for n in lengths.tolist()]",
        "mask = torch.zeros(len(lengths), total, dtype=torch.bool)\nwritten = total - lengths.max()\n"
        "for row, n in enumerate(lengths):\n    mask[row, -int(n + written):] = True\nreturn mask",
        "pad = lengths.numpy().max() - lengths.numpy()\nreturn np.arange(total)[None, :] >= pad[:, None]",
    ],
    "next_position": [
        "return list(range(held, held + new))",
        "return np.arange(held, held + new)",
        "return held + torch.arange(new)",
        "return range(held, held + new)",
        "return (held + i for i in range(new))",
    ],
    "real_slots": [
        "return torch.arange(window) >= window - seen",
        "n = min(seen, window)\nreturn [False] * (window - n) + [True] * n",
        "return np.arange(window) + seen >= window",
        "return tuple(window - slot <= seen for slot in range(window))",
    ],
    "to_codes": [
        "return torch.clamp(torch.round(x / step), -largest, largest)",
        "return np.clip(np.rint((x / step).numpy()), -largest, largest)",
        "return [[max(-largest, min(largest, round(float(v / s)))) for v in row] for row, s in zip(x, step)]",
        "return (x / step).clamp(-largest, largest).round().int()",
    ],
    "add_up": [
        "out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far\nreturn out",
        "if so_far is None:\n    return received\nmore = received.shape[-1] - so_far.shape[-1]\n"
        "return received + torch.nn.functional.pad(so_far, (0, more))",
        "out = received.numpy().copy()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far.numpy()\nreturn out",
        "old = torch.zeros_like(received)\nif so_far is not None:\n    old[..., : so_far.shape[-1]] = so_far\nreturn old + received",
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
    "rehearse": [
        "x = inputs[layer - 1]\nx = x / (x.square().mean() + 1e-6).sqrt() * gains[layer]\nreturn weights[layer] @ x",
        "x = norm(inputs[layer - 1], gains[layer])\nreturn (weights[layer] * x).sum(-1)",
        "return torch.nn.functional.linear(norm(inputs[layer - 1], gains[layer]), weights[layer])",
        "return (norm(inputs[layer - 1], gains[layer])[None] @ weights[layer].T)[0].numpy()",
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
    "quest_step": [
        "out = []\nfor q, k, v in zip(query, keys, values):\n    pages = list(zip(k.split(page), v.split(page)))\n"
        "    bound = [float(torch.where(q > 0, q * rows.amax(0), q * rows.amin(0)).sum()) for rows, _ in pages]\n"
        "    best = sorted(range(len(pages)), key=lambda i: -bound[i])[:count]\n"
        "    k, v = (torch.cat([pages[i][n] for i in best]) for n in (0, 1))\n"
        "    out.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)\nreturn torch.stack(out)",
        "h, t, d = keys.shape\nn = math.ceil(t / page)\nb = torch.empty(h, n)\nfor i in range(n):\n    rows = keys[:, i * page : (i + 1) * page]\n"
        "    b[:, i] = (query.clamp(min=0) * rows.max(1).values + query.clamp(max=0) * rows.min(1).values).sum(-1)\n"
        "rank = b.argsort(-1, descending=True).argsort(-1)\nseen = (rank < count).repeat_interleave(page, 1)[:, :t]\n"
        "return torch.nn.functional.scaled_dot_product_attention(query[:, None], keys, values, seen[:, None])[:, 0]",
        "b = np.stack([(query[:, None] * p).amax(1).sum(-1).numpy() for p in keys.split(page, 1)], 1)\n"
        "best = np.argsort(-b, axis=1)[:, :count]\ns = torch.einsum('hd,htd->ht', query, keys).numpy() / np.sqrt(query.shape[1])\n"
        "w = np.exp(s - s.max())\nfor head, row in enumerate(w):\n    row[[t for t in range(len(row)) if t // page not in best[head]]] = 0\n"
        "return np.einsum('ht,htd->hd', w / w.sum(1, keepdims=True), values.numpy())",
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
    "generate": [
        ("for _ in range(new):\n    ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)\nreturn ids", "`end` is not looked at"),
        ("for _ in range(new):\n    ids = torch.cat([ids, model(ids)[:, 0].argmax(-1, keepdim=True)], 1)\nreturn ids", "test 1 of 6"),
        ("for _ in range(new):\n    ids = torch.cat([ids, model(ids[:, -1:])[:, -1].argmax(-1, keepdim=True)], 1)\nreturn ids", "test 1 of 6"),
        ("for _ in range(new):\n    ids = torch.cat([ids, model(ids)[:, -1].argmax(-1)], 1)\nreturn ids", "it stops with RuntimeError"),
        ("for _ in range(new):\n    ids.append(model(ids)[:, -1].argmax(-1))\nreturn ids", "no such method"),
        ("for _ in range(new):\n    ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)", "returns nothing"),
        ("done = torch.zeros(len(ids)).bool()\nfor _ in range(new):\n    now = model(ids)[:, -1].argmax(-1)\n    now[done] = end\n"
         "    done |= now == end\n    ids = torch.cat([ids, now[:, None]], 1)\nreturn ids", "goes on feeding"),
        ("done = torch.zeros(len(ids)).bool()\nfor _ in range(new):\n    now = model(ids)[:, -1].argmax(-1)\n    now[done] = end\n"
         "    done |= now == end\n    ids = torch.cat([ids, now[:, None]], 1)\n    if done.any():\n        break\nreturn ids", "still have something to say"),
        ("return ids", "unchanged"),
        ("done = torch.zeros(len(ids)).bool()\nfor _ in range(new):\n    now = model(ids)[:, -1].argmax(-1)\n    now[done] = end\n"
         "    done |= now == end\n    ids = torch.cat([ids, now[:, None]], 1)\n    if done.all():\n        break\nreturn ids.float()", "whole numbers"),
    ],
    "attend_step": [
        ("q = x @ w_q\nK, V = torch.cat([K, x @ w_k], 1), torch.cat([V, x @ w_v], 1)\n"
         "return (q @ K.mT / q.shape[-1] ** 0.5).softmax(-1) @ V, K, V", "test 4 of 6"),
        ("q = x @ w_q\nK, V = torch.cat([K, x @ w_k], 1), torch.cat([V, x @ w_v], 1)\ng = len(q) // len(K)\n"
         "return (q @ K.repeat_interleave(g, 0).mT / q.shape[-1] ** 0.5).softmax(-1) @ V.repeat_interleave(g, 0), K, V", "the mask is missing"),
        ("q = x @ w_q\nK, V = torch.cat([K, x @ w_k]), torch.cat([V, x @ w_v])\nreturn (q @ K.mT).softmax(-1) @ V, K, V", "it stops with RuntimeError"),
        ("q, k, v = x @ w_q, x @ w_k, x @ w_v\nreturn q, k, v", "K must be longer"),
        ("K, V = torch.cat([K, x @ w_k], 1), torch.cat([V, x @ w_v], 1)\nreturn x @ w_q, K, V", "K and V are right; the output is not"),
        ("q = x @ w_q\nK, V = torch.cat([K, x @ w_k], 1), torch.cat([V, x @ w_v], 1)\ng = len(q) // len(K)\nn, t = len(x), K.shape[1]\n"
         "s = (q @ K.repeat_interleave(g, 0).mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(n, t).triu(t - n + 1).bool(), -torch.inf)\n"
         "return s.softmax(-1) @ V.repeat_interleave(g, 0)", "the output alone"),
        ("K = torch.cat([K, x @ w_k], 1)", "returns nothing"),
        ("return torch.cat([K, x @ wk], 1)", "NameError"),
        ("q = x @ w_q\nK, V = torch.cat([K, x @ w_k], 1), torch.cat([V, x @ w_v], 1)\ng = len(q) // len(K)\nn, t = len(x), K.shape[1]\n"
         "s = (q @ K.repeat_interleave(g, 0).mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(n, t).triu(1).bool(), -torch.inf)\n"
         "return s.softmax(-1) @ V.repeat_interleave(g, 0), K, V", "held already"),
    ],
    "place": [
        ("return [(i // block, i % block) for i, _ in enumerate(events)]", "two texts write into one page"),
        ("out, n = [], {}\nfor what, t in events:\n    if what == 'add':\n        out.append((n.setdefault(t, 0) // block, n[t] % block))\n"
         "        n[t] += 1\nreturn out", "test 3 of 6"),
        ("pages, out, made = {}, [], 0\nfor what, t in events:\n    if what == 'add':\n        n = pages.setdefault(t, [])\n        if len(n) % block == 0:\n"
         "            made += 1\n        n.append(made - 1)\n        out.append((n[-1], (len(n) - 1) % block))\nreturn out", "test 3 of 6"),
        ("for what, text in events:\n    print(what, text)", "returns nothing"),
        ("return [(page, slot) for page, slot in events]", "unchanged"),
        ("table = {}\nfor what, text in events:\n    table[text].append(what)\nreturn table", "it stops with KeyError"),
        ("page = {}\nout = []\nseen = {}\nfor what, t in events:\n    if what == 'end':\n        continue\n    page.setdefault(t, len(page))\n"
         "    seen[t] = seen.get(t, -1) + 1\n    out.append((page[t], seen[t]))\nreturn out", "there is no slot `block`"),
        ("table, length, made, out = {}, {}, 0, []\nfor what, t in events:\n    if what == 'end':\n        table[t], length[t] = [], 0\n        continue\n"
         "    n = length.get(t, 0)\n    if n % block == 0:\n        table.setdefault(t, []).append(made)\n        made += 1\n"
         "    out.append((table[t][-1], n % block))\n    length[t] = n + 1\nreturn out", "never come back"),
    ],
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
    "snapkv": [
        ("return (q[:, -1:] @ k.mT)[:, 0].topk(budget).indices", "window is not whole"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1)", "causal mask is missing"),
        ("h, t, d = k.shape\nw = (q @ k.mT / d**0.5).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf).softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1)", "as in H2O"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).softmax(-1).sum(1)\nreturn w.topk(budget)", "two tensors here"),
        ("h, t, d = k.shape\nreturn torch.arange(t - budget, t).expand(h, -1).float()", "test 1 of 5"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).masked_fill(torch.ones(window, t).triu(t - window + 1).bool(), -torch.inf)\n"
         "w = w.softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget).indices, torch.arange(t - window, t).expand(h, -1)], 1)", "on top of the budget"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.T / d**0.5).softmax(-1)\nreturn w", "it stops with RuntimeError"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).masked_fill(torch.ones(window, t).triu(t - window + 1).bool(), -torch.inf)\n"
         "w = w.softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1).double()", "not floats"),
        ("q[:, -window:] @ k.mT", "returns nothing"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).masked_fill(torch.ones(window, t).triu(t - window).bool(), -torch.inf)\n"
         "w = w.softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1)", "hides a token from itself"),
        ("h, t, d = k.shape\nw = (q[:, -window:] @ k.mT / d**0.5).masked_fill(torch.ones(window, t).triu(t - window + 1).bool(), 0)\n"
         "w = w.softmax(-1).sum(1)[:, :-window]\n"
         "return torch.cat([w.topk(budget - window).indices, torch.arange(t - window, t).expand(h, -1)], 1)", "0 is a score like any other"),
    ],
    "step_seconds": [
        ("return sum(compute) + sum(transfer)", "take turns"),
        ("return max(sum(compute), sum(transfer))", "first layer must be there"),
        ("return sum(max(c, t) for c, t in zip(compute, transfer))", "with itself"),
        ("return transfer[0] + sum(max(c, t) for c, t in zip(compute, transfer[1:])) + compute[-1]", "test "),
        ("link = device = 0\nfor c, t in zip(compute, transfer):\n    link += t\n    device = max(device, link) + c\nreturn device", "buffers is not used"),
        ("return compute + transfer", "shape"),
        ("link = 0\nfor t in transfer:\n    link += t\nlink", "returns nothing"),
        ("return max(compute[i] + transfer[i + 1] for i in range(len(compute)))", "it stops with IndexError"),
        ("link = device = 0\nfor c, t in zip(compute, transfer):\n    link += t\n    device = link + c\nreturn device", "one at a time"),
    ],
    "choose": [
        ("s = (keys @ guess[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "on the host with the tokens"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / q.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "whole head dimension"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.max() - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "one maximum for all"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\nreturn s.topk(min(cap, int(n))).indices", "rounded the mean down"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(math.ceil(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "number of columns is rounded up"),
        ("c = queries.abs().sum(1).topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\n"
         "k = keys.gather(-1, c)\nreturn (k @ q[..., None])[..., 0].topk(cap).indices", "it stops with RuntimeError"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nreturn s.topk(cap).indices", "cap tokens are always fetched"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\nreturn s.topk(math.ceil(n)).indices", "cap is missing"),
        ("size = queries.abs().sum(1) + keys.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\nreturn s.topk(min(cap, math.ceil(n)))", "two tensors here"),
        ("size = queries.abs().sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "only the queries choose"),
        ("size = (queries + keys).sum(1)\nc = size.topk(round(part * keys.shape[2])).indices\nq = guess.gather(-1, c)\nk = keys.gather(-1, c[:, None].expand(-1, keys.shape[1], -1))\ns = (k @ q[..., None])[..., 0] / guess.shape[-1] ** 0.5\nn = (s > s.amax(-1, keepdim=True) - alpha).sum(-1).float().mean()\n"
         "return s.topk(min(cap, math.ceil(n))).indices", "with their signs"),
    ],
    "norm_score": [
        ("return -keys.norm(dim=-1)", "test 1 of 7"),
        ("return keys.norm(dim=-1)", "the largest keys come first"),
        ("s = -keys.norm(dim=-1)\ns[..., -recent:] = torch.inf\nreturn s.masked_fill(positions < sinks, torch.inf)", "test 4 of 7"),
        ("s = -keys.norm(dim=-1)\ns = s.masked_fill(positions > positions.amax(-1, keepdim=True) - recent, torch.inf)\n"
         "s = s.masked_fill(positions < sinks, torch.inf)\nreturn s.masked_fill(positions < 0, -torch.inf)", "the neighbours have no say"),
        ("s = -keys.norm(dim=-1)\ns = s.masked_fill(positions > positions.amax(-1, keepdim=True) - recent, torch.inf)\n"
         "return s.masked_fill(positions < 0, -torch.inf)", "test 3 of 7"),
        ("s = -keys.norm(dim=-1)\ns = s.masked_fill(positions > positions.amax(-1, keepdim=True) - recent, torch.inf)\n"
         "return s.masked_fill(positions < sinks, torch.inf)", "test 5 of 7"),
        ("i = torch.arange(positions.shape[-1])\nfar = (i[:, None] - i).abs() > reach\n"
         "s = -keys.norm(dim=-1)[..., None, :].expand(*positions.shape, len(i))\n"
         "s = s.masked_fill(far | (positions < 0)[..., None, :], -torch.inf).amax(-1)\n"
         "s = s.masked_fill(positions > positions.amax(-1, keepdim=True) - recent, torch.inf)\n"
         "return s.masked_fill(positions < sinks, torch.inf).masked_fill(positions < 0, -torch.inf)", "neighbouring slots"),
        ("s = keys.norm(dim=-1)\ns = s.masked_fill(positions > positions.amax(-1, keepdim=True) - recent, torch.inf)\n"
         "return s.masked_fill(positions < sinks, torch.inf).masked_fill(positions < 0, -torch.inf)", "test 1 of 7"),
        ("return -keys.norm(dim=-1, keepdim=True)", "shape"),
        ("s = -keys.norm(dim=-1)\ns = s.masked_fill(positions > positions.amax(-1) - recent, torch.inf)\nreturn s", "it stops with RuntimeError"),
        ("return torch.log(-keys.norm(dim=-1))", "NaN"),
        ("keys /= 2\nreturn -keys.norm(dim=-1)", "test 1 of 7"),
    ],
    "visible": [
        ("return [[i >= total - n for i in range(total)] for n in lengths.tolist()]", "its oldest goes"),
        ("return torch.ones(len(lengths), total, dtype=torch.bool)", "padding is visible"),
        ("pad = lengths.max() - lengths\nreturn [[i > p for i in range(total)] for p in pad.tolist()]", "first token of each text"),
        ("pad = lengths.max() - lengths\nreturn [[int(i >= p) for i in range(total)] for p in pad.tolist()]", "True and False"),
        ("return [[[i < n for n in lengths.tolist()] for i in range(total)]]", "shape"),
        ("return torch.arange(total) >= lengths.max() - lengths", "it stops with RuntimeError"),
        ("mask = torch.zeros(len(lengths), total).bool()\nmask[:, -3:] = True\nreturn mask", "one token more at each step"),
    ],
    "next_position": [
        ("return list(range(new))", "does not advance"),
        ("return torch.arange(held + 1, held + 1 + new)", "not 7"),
        ("return torch.linspace(held, held + new - 1, new)", "not floats"),
        ("return torch.arange(float(held), held + new)", "not floats"),
        ("return [held] * new", "one position for all"),
        ("return [slot >= new - held for slot in range(new)]", "`real_slots`"),
        ("return held, held + new", "two ends"),
    ],
    "real_slots": [
        ("return [int(s >= window - seen) for s in range(window)]", "True and False"),
        ("return torch.arange(window) < seen", "right padding"),
        ("return [s > window - seen for s in range(window)]", "oldest token is masked"),
        ("return torch.ones(window).bool()", "mask is forgotten"),
        ("return [s >= window - seen for s in range(1, window + 1)]", "one slot of padding"),
        ("mask = [False] * window\nfor s in range(seen):\n    mask[window - 1 - s] = True\nreturn mask", "IndexError"),
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
    "add_up": [
        ("if so_far is None:\n    return received\nreturn torch.cat([so_far, received[..., so_far.shape[-1]:]], -1)", "is lost"),
        ("return received", "forgotten"),
        ("if so_far is None:\n    return received\nreturn so_far + received[..., : so_far.shape[-1]]", "new tokens are missing"),
        ("if so_far is None:\n    return received\nreturn so_far + received", "it stops with RuntimeError"),
        ("if so_far is not None:\n    received[..., : so_far.shape[-1]] += so_far\nreturn received", "in place"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., -so_far.shape[-1] :] += so_far\nreturn out", "the last slots"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far\n"
         "return out / out.sum(-1, keepdim=True)", "divided by their total"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += so_far\nprint(out)", "returns nothing"),
        ("out = received.clone()\nif so_far is not None:\n    out[..., : so_far.shape[-1]] += 2 * so_far\nreturn out", "another total"),
        ("return received + so_far", "it stops with"),
        ("if so_far is None:\n    return received\nheld = so_far.shape[-1]\n"
         "return torch.cat([so_far + received[..., :held].mean(), received[..., held:]], -1)", "all held tokens grow by the same"),
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
    "quest_step": [
        ("b = torch.stack([(query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\n"
         "c = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.masked_fill(~m, -torch.inf).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "only the largest values"),
        ("b = torch.stack([(p @ query[..., None])[..., 0].amax(1) for p in keys.split(page, 1)], 1)\n"
         "c = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.masked_fill(~m, -torch.inf).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "chosen by their keys"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.softmax(-1) * m\nreturn (w[:, None] @ values)[:, 0]", "mask before it"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = (s * m).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "minus infinity"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0]\nw = s.masked_fill(~m, -torch.inf).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "not divided by the root"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nreturn s.masked_fill(~m, -torch.inf).softmax(-1)", "those are the weights"),
        ("s = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "all pages are fetched"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\n"
         "c = b.topk(count).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.masked_fill(~m, -torch.inf).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "topk is asked for more numbers"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.masked_fill(m, -torch.inf).softmax(-1)\nreturn (w[:, None] @ values)[:, 0]", "attention saw other tokens"),
        ("b = torch.stack([torch.maximum(query * p.amin(1), query * p.amax(1)).sum(-1) for p in keys.split(page, 1)], 1)\nc = b.topk(min(count, b.shape[1])).indices\nm = (torch.arange(keys.shape[1]) // page == c[..., None]).any(1)\ns = (keys @ query[..., None])[..., 0] / query.shape[-1] ** 0.5\nw = s.masked_fill(~m, -torch.inf).softmax(-1)\nw @ values", "returns nothing"),
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
    assert verdict.state == INCORRECT and told and told in str(verdict), verdict
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
