"""Windows: known text of which a part is prefilled and scored from the prefill, the rest decoded."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.decode import Stepper

from .batching import LOGITS, TOKENS, TOKENS_LONG, pack, pad_left, pad_right, picked


@torch.inference_mode()
def windows(scorer, rows: list[tuple[list[int], list[int]]], prefilled: float = 1.0) -> dict[str, list]:
    """Score known text: (inputs, targets), the targets belonging to the last inputs.

    The first `prefilled` of the inputs are prefilled and scored from the prefill, the others are
    decoded one by one (1.0: one pass, nothing decoded; `recompute` stores nothing and is always
    scored so). An answer is (log-likelihood, is it greedy).
    """
    most = LOGITS / scorer.vocabulary / max(len(inputs) for inputs, _ in rows)
    batch = max(1, min(scorer.batch_size, int(most)))
    parts = pack([*range(len(rows))], lambda index: len(rows[index][0]), batch, tokens=TOKENS_LONG)
    compute = lambda members: _part(scorer, [rows[index] for index in members], prefilled)
    return scorer.answered(len(rows), parts, compute)


def _part(scorer, texts: list, prefilled: float) -> dict[str, list]:
    """The answers of a batch."""
    lasting = {name: cache for name, cache in scorer.caches.items() if not cache.recompute}
    passing = {name: cache for name, cache in scorer.caches.items() if cache.recompute}
    found = _window(scorer, lasting, texts, prefilled) | {name: [] for name in passing}
    few = max(1, TOKENS // len(texts[0][0]))  # rows at a time, where nothing is decoded
    for start in range(0, len(texts) if passing else 0, few):
        for name, scores in _window(scorer, passing, texts[start : start + few], 1.0).items():
            found[name] += scores
    return found


def _window(scorer, caches: dict, rows: list, prefilled: float) -> dict[str, list[tuple[float, bool]]]:
    full = [[-1] * (len(inputs) - len(targets)) + list(targets) for inputs, targets in rows]
    cut = [max(1, int(prefilled * len(inputs))) for inputs, _ in rows]
    ids, mask = pad_left([row[0][:c] for row, c in zip(rows, cut, strict=True)], 0, scorer.device)
    first, _ = pad_left([t[:c] for t, c in zip(full, cut, strict=True)], -1, scorer.device)
    inputs = pad_right([row[0][c:] for row, c in zip(rows, cut, strict=True)], 0, "cpu")
    targets = pad_right([t[c:] for t, c in zip(full, cut, strict=True)], -1, "cpu")
    left = torch.tensor([len(t) - c for t, c in zip(full, cut, strict=True)])
    known: list = [None, None]  # logits of the shared prefill, and what was picked from them

    def score(name: str, stepper: Stepper, logits: Tensor) -> list:
        if known[0] is not logits:
            known[:] = logits, picked(logits, first)
        total, greedy = known[1][0].sum(1).cpu(), known[1][1].all(1).cpu()
        active = torch.arange(len(rows))
        if inputs.shape[1] and scorer.at_once(stepper, torch.tensor(cut), inputs.shape[1]):
            for start, on, found in scorer.known(name, stepper, inputs, left):
                chosen, hit = picked(found.cpu(), targets[on, start : start + found.shape[1]])
                total[on] += chosen.sum(1)
                greedy[on] &= hit.all(1)
            active = active[:0]
        for step in range(inputs.shape[1] if len(active) else 0):
            kept = scorer.thin(stepper, left[active] > step, torch.tensor(cut)[active] + step)
            active = active if kept is None else active[kept]
            logits = scorer.step(name, stepper, inputs[active, step]).cpu()
            chosen, hit = picked(logits, targets[active, step])
            total[active] += chosen
            greedy[active] &= hit
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    return scorer.each(caches, ids, mask, False, score)
