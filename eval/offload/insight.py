"""Experiments that look inside: how alike block inputs are, and how well a rehearsal guesses."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import kvlab
from kvlab.attention import group_importance
from kvlab.decode import Stepper
from kvlab.models import Anatomy, calibration_ids
from kvlab.place import Device
from kvlab.place.infinigen import VARIANTS
from kvlab.place.skew import skew
from kvlab.place.topk import true_scores

from .rows import MEASURED, Row

# Document 001: mean cosine of a block's input with the input, attention output and feed-forward output of
# the block before, OPT-6.7B and Llama-2-7B.
PUBLISHED = {"opt": (0.95, 0.29, 0.34), "llama": (0.89, 0.31, 0.37)}
PARTS = ("block input", "attention output", "FFN output")
STEPS = 16  # decode steps looked at
SHARE = 0.1  # of the past tokens: the true top-k


@torch.no_grad()
def similarity(settings) -> list[Row]:
    """1. Cosine of every block's input with what the block before took in and added, as in the slides."""
    rows = []
    for name in settings.models:
        model, _ = settings.load(name)
        ids = calibration_ids(model).to(model.device)
        found = cosines(model, ids)
        published = PUBLISHED.get(model.config.model_type, (None,) * 3)
        for part, values, known in zip(PARTS, found.T.tolist(), published, strict=True):
            mean = sum(values[1:]) / max(1, len(values) - 1)  # from layer 2 on: those InfiniGen guesses
            label = f"{name}: {part}, mean from layer 2"
            rows.append(Row("similarity", label, mean, "cosine", MEASURED, ids.shape[1], known))
            rows += [
                Row("similarity", f"{name}: {part}, layer {layer}", value, "cosine", MEASURED, ids.shape[1])
                for layer, value in enumerate(values, 1)
            ]
    return rows


def cosines(model, ids: Tensor) -> Tensor:
    """`[layers - 1, 3]`: cosine of the input of block i (1, 2, ...) with the input, the attention output and
    the feed-forward output of block i - 1, mean over the tokens of ids `[1, tokens]`."""
    family = Anatomy(model).family
    blocks, inputs, attended = model.get_submodule(family.blocks), [], []
    hooks = [
        block.register_forward_pre_hook(
            lambda _, args, kwargs: inputs.append(args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        for block in blocks
    ]
    hooks += [
        getattr(block, family.attention).register_forward_hook(lambda _, __, out: attended.append(out[0]))
        for block in blocks
    ]
    try:
        model(ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for layer in range(1, len(blocks)):
        now, before, attention = inputs[layer], inputs[layer - 1], attended[layer - 1]
        parts = (before, attention.view_as(before), now - before - attention.view_as(before))
        found.append([float(cosine_similarity(now, part, dim=-1).mean()) for part in parts])
    return torch.tensor(found)


class Probe(Device):
    """Keeps everything on the device and notes the prompt's queries and keys, and of every step the guessed
    and the true query."""

    def __init__(self):
        self.guesses, self.queries, self._guess = [], [], None

    def bind(self, anatomy, layer: int) -> None:
        anatomy.watch_block_inputs()

    def prefill(self, layer, query: Tensor, keys: Tensor) -> None:
        self.prompt = query, keys

    def foresee(self, layer, query) -> None:
        self._guess = query()

    def read(self, layer, query: Tensor, scaling: float):
        if self._guess is not None:
            self.guesses.append(self._guess)
            self.queries.append(query)
        return super().read(layer, query, scaling)


@torch.no_grad()
def recall(settings) -> list[Row]:
    """2. Part of the true top tenth of past tokens that the rehearsal finds, plain and with skewing, for each
    layer from 2 on, against the partial ratio."""
    rows = []
    for name in settings.models:
        model, _ = settings.load(name)
        ids = calibration_ids(model).to(model.device)
        cache = kvlab.KVCache(model, place=Probe())
        stepper = Stepper(model, cache)
        stepper.feed(ids[:, :-STEPS])
        for column in range(ids.shape[1] - STEPS, ids.shape[1]):
            stepper.feed(ids[:, column : column + 1])
        for ratio in [r / 10 for r in range(1, 11)]:
            for skewed in (False, True):
                matrices = skew(model) if skewed else None
                values = [
                    found(layer, ratio, None if matrices is None else matrices[layer.index], ids.shape[1])
                    for layer in cache.layers[2:]
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


def found(layer, ratio: float, matrix: Tensor | None, tokens: int) -> float:
    """Mean over steps and heads of |guessed top k and true top k| / k, k = SHARE of the past tokens."""
    keys, _ = layer.store.read(layer.place.queries[0].device)
    heads = keys.shape[1]
    first = tokens - STEPS  # past tokens at the first step

    def turned(x: Tensor) -> Tensor:
        if matrix is None:
            return x
        return x @ matrix.repeat_interleave(x.shape[1] // heads, dim=0)

    query, prompt = (turned(x) for x in layer.place.prompt)
    queried = query.abs().unflatten(1, (heads, -1)).mean(2).sum(2)
    count = max(1, round(ratio * keys.shape[-1]))
    columns = VARIANTS["paper"](queried, prompt.abs().sum(2), count).unsqueeze(2)

    def taken(x: Tensor) -> Tensor:
        own = columns.repeat_interleave(x.shape[1] // heads, dim=1)
        return x.gather(3, own.expand(-1, -1, x.shape[2], -1))

    partial, shares = taken(turned(keys)), []
    for step, (guess, true) in enumerate(zip(layer.place.guesses, layer.place.queries, strict=True)):
        past = first + step
        k = max(1, int(SHARE * past))
        sets = [
            group_importance(true_scores(asked, held[:, :, :past], layer.scaling, None), heads)
            .topk(k)
            .indices
            for asked, held in ((taken(turned(guess)), partial), (true, keys))
        ]
        both = (sets[0].unsqueeze(-1) == sets[1].unsqueeze(-2)).any(-1).float().mean()
        shares.append(float(both))
    return sum(shares) / len(shares)
