"""InfiniGen's assumptions: how similar block inputs are, and how well its rehearsal predicts."""

from __future__ import annotations

import torch
from torch import Tensor

from kvlab.attention import group_importance
from kvlab.calibrate.skew import skew
from kvlab.measure.studies import Passage, read, scores, skewed, strongest_columns
from kvlab.measure.studies import similarity as similarities
from kvlab.models import calibration_ids

from .published import MEASURED, row

# Lee et al. 2024: mean cosine of a block's input with the input, attention output and feed-forward output
# of the block before, OPT-6.7B and Llama-2-7B.
PUBLISHED = {"opt": (0.95, 0.29, 0.34), "llama": (0.89, 0.31, 0.37)}
STEPS = 16  # queries looked at, the last of the text
SHARE = 0.1  # of the past tokens: the true top-k


@torch.no_grad()
def similarity(study) -> dict:
    """1. Cosine of every block's input with what the block before took in and added."""
    rows = []
    for name in study.models:
        model, _ = study.load(name)
        ids = calibration_ids(model).to(model.device)
        alike = similarities(read(model, ids))
        published = PUBLISHED.get(model.config.model_type, (None,) * 3)
        for (part, cosines), known in zip(alike.items(), published, strict=True):
            values = cosines.tolist()
            mean = sum(values[1:]) / max(1, len(values) - 1)  # from layer 2 on: those InfiniGen guesses
            label = f"{name}: {part}, mean from layer 2"
            rows.append(row("similarity", label, mean, "cosine", MEASURED, ids.shape[1], known))
            rows += [
                row("similarity", f"{name}: {part}, layer {layer}", value, "cosine", MEASURED, ids.shape[1])
                for layer, value in enumerate(values, 1)
            ]
    return {"rows": rows}


def found(
    passage: Passage, layer: int, budget: float, *, ratio: float = 1.0, matrix: Tensor | None = None,
    last: int = 32, columns=strongest_columns,
) -> float:  # fmt: skip
    """The part of the true top tokens that a guess chooses, over the last queries of a passage, mean over
    queries and KV heads.

    budget: part of the past tokens that is chosen. ratio: part of the columns that the choice looks at,
    picked by the tokens before the last queries (columns: how). matrix: the layer's skewing matrices (None:
    no skewing). last: how many queries. Raises ValueError for layer 0: no block comes before it.
    """
    if layer == 0:
        raise ValueError("layer=0: no block comes before it, so there is no guess")
    query, asked, keys = passage.queries[layer], passage.guesses[layer], passage.keys[layer]
    true = scores(query[:, -last:], keys, passage.scaling)
    if matrix is not None:
        query, asked, keys = (skewed(x, matrix) for x in (query, asked, keys))
    some = columns(query[:, :-last], keys[:, :-last], ratio)
    cheap = scores(asked[:, -last:], keys, passage.scaling, some)
    position = torch.arange(passage.tokens, device=keys.device)
    later = position >= position[-last:, None]  # [last, tokens]; the newest token is there anyway
    importance = [
        group_importance(x.masked_fill(later, -torch.inf).transpose(0, 1), keys.shape[0])
        for x in (true, cheap)
    ]  # [last, kv_heads, tokens]
    count = max(1, round(budget * (passage.tokens - last)))
    best, chosen = (torch.zeros_like(x).scatter_(2, x.topk(count).indices, 1.0) for x in importance)
    return ((best * chosen).sum(2).mean() / count).item()


@torch.no_grad()
def recall(study) -> dict:
    """2. Part of the true top tenth of past tokens that the rehearsal finds, plain and with skewing, for each
    layer from 2 on, against the partial ratio."""
    rows = []
    for name in study.models:
        model, _ = study.load(name)
        ids = calibration_ids(model).to(model.device)
        passage = read(model, ids)
        for ratio in [r / 10 for r in range(1, 11)]:
            for turned in (False, True):
                matrices = skew(model) if turned else [None] * len(passage.keys)
                values = [
                    found(passage, layer, SHARE, ratio=ratio, matrix=matrices[layer], last=STEPS)
                    for layer in range(2, len(passage.keys))
                ]
                label = f"{name}: {'skewed' if turned else 'plain'}, ratio {ratio:g}"
                mean = sum(values) / len(values)
                rows.append(row("recall", f"{label}, mean", mean, "share", MEASURED, ids.shape[1]))
                if ratio in (0.3, 1.0):
                    rows += [
                        row("recall", f"{label}, layer {i}", v, "share", MEASURED, ids.shape[1])
                        for i, v in enumerate(values, 2)
                    ]
    return {"rows": rows}


EXPERIMENTS = {"similarity": similarity, "recall": recall}
