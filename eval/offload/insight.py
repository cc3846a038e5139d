"""Experiments that look inside: how alike block inputs are, and how well a rehearsal guesses."""

from __future__ import annotations

import torch

from kvlab.calibrate.skew import skew
from kvlab.measure import studies
from kvlab.models import calibration_ids

from .rows import MEASURED, Row

# Document 001: mean cosine of a block's input with the input, attention output and feed-forward output of
# the block before, OPT-6.7B and Llama-2-7B.
PUBLISHED = {"opt": (0.95, 0.29, 0.34), "llama": (0.89, 0.31, 0.37)}
STEPS = 16  # queries looked at, the last of the text
SHARE = 0.1  # of the past tokens: the true top-k


@torch.no_grad()
def similarity(settings) -> list[Row]:
    """1. Cosine of every block's input with what the block before took in and added, as in the slides."""
    rows = []
    for name in settings.models:
        model, _ = settings.load(name)
        ids = calibration_ids(model).to(model.device)
        found = studies.similarity(studies.read(model, ids))
        published = PUBLISHED.get(model.config.model_type, (None,) * 3)
        for (part, cosines), known in zip(found.items(), published, strict=True):
            values = cosines.tolist()
            mean = sum(values[1:]) / max(1, len(values) - 1)  # from layer 2 on: those InfiniGen guesses
            label = f"{name}: {part}, mean from layer 2"
            rows.append(Row("similarity", label, mean, "cosine", MEASURED, ids.shape[1], known))
            rows += [
                Row("similarity", f"{name}: {part}, layer {layer}", value, "cosine", MEASURED, ids.shape[1])
                for layer, value in enumerate(values, 1)
            ]
    return rows


@torch.no_grad()
def recall(settings) -> list[Row]:
    """2. Part of the true top tenth of past tokens that the rehearsal finds, plain and with skewing, for each
    layer from 2 on, against the partial ratio."""
    rows = []
    for name in settings.models:
        model, _ = settings.load(name)
        ids = calibration_ids(model).to(model.device)
        passage = studies.read(model, ids)
        for ratio in [r / 10 for r in range(1, 11)]:
            for skewed in (False, True):
                matrices = skew(model) if skewed else [None] * len(passage.keys)
                values = [
                    studies.found(passage, layer, SHARE, ratio=ratio, matrix=matrices[layer], last=STEPS)[0]
                    for layer in range(2, len(passage.keys))
                ]
                label = f"{name}: {'skewed' if skewed else 'plain'}, ratio {ratio:g}"
                mean = sum(values) / len(values)
                rows.append(Row("recall", f"{label}, mean", mean, "share", MEASURED, ids.shape[1]))
                if ratio in (0.3, 1.0):
                    rows += [
                        Row("recall", f"{label}, layer {i}", v, "share", MEASURED, ids.shape[1])
                        for i, v in enumerate(values, 2)
                    ]
    return rows
