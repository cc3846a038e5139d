"""Calibrate KVzap's surrogate: `python -m course.recipes.kvzap --model smollm2 --out kvzap.safetensors`."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import kvlab
from eval.core.errors import one_line
from eval.tasks import corpus
from kvlab.calibrate import profile
from kvlab.keep import KVzip
from kvlab.keep.kvzap import KIND, features
from kvlab.models import ModelShape, rotations_of
from kvlab.parameters import check_number, check_whole

SEED = 7_000_000  # not those of training, evaluation or other recipes
LEAST = 1e-6  # of a score: what is below it is as little
PENALTY = 1e-3  # of ridge regression, times the mean square of what it reads
HELD_OUT = 4  # one document of so many is not fitted: it says which threshold keeps which share


class Telling(KVzip):
    """KVzip that hands every layer, with the scores it has heard, to `tell(layers)` before it chooses."""

    def __init__(self, tell: Callable):
        super().__init__(0.5, sinks=0)
        object.__setattr__(self, "tell", tell)

    def agree(self, layers) -> None:
        self.tell(layers)
        super().agree(layers)


def documents(tokenizer, count: int, longest: int) -> list[list[int]]:
    """Token ids of texts: facts in prose, and no question."""
    rng, found = random.Random(SEED), []
    while len(found) < count:
        wording, facts = rng.choice([*corpus.WORDINGS]), rng.randint(2, 12)
        text = corpus.recall(rng, facts, wording, filler=corpus.prose(rng, rng.randint(0, 24))).context
        found.append(tokenizer(text).input_ids[:longest])
    return found


def heard(model, documents: Iterable[list[int]]):
    """For every document and layer: (order of the layer, what it holds of the tokens `[tokens, numbers]`, log
    of their scores `[tokens, kv_heads]`), fp64."""
    rotations, found = rotations_of(model), []

    def tell(layers) -> None:
        for layer, rotation in zip(layers, rotations, strict=True):
            keys, values = layer.store.read(torch.device("cpu"))
            keys = keys if rotation is None else rotation.undo(keys, layer.slot_positions)
            scores = layer.state.scores[0].T.double().clamp(min=LEAST).log()
            found.append((layer.order, features(keys, values)[0].double(), scores))

    for ids in documents:
        kvlab.Stepper(model, kvlab.KVCache(model, keep=Telling(tell))).feed(torch.tensor([ids]))
        yield from found
        found.clear()


class Ridge:
    """Ridge regression from sums over rows: those of x x' and x y', x `[numbers]`, y `[kv_heads]`."""

    def __init__(self, numbers: int, heads: int):
        self.xx, self.xy = (
            torch.zeros(numbers + 1, numbers + 1).double(),
            torch.zeros(numbers + 1, heads).double(),
        )

    def add(self, x: Tensor, y: Tensor) -> None:
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)
        self.xx += x.T @ x
        self.xy += x.T @ y

    def solve(self) -> tuple[Tensor, Tensor]:
        """Weight `[kv_heads, numbers]` and bias `[kv_heads]`; the bias is free of the penalty."""
        size = len(self.xx) - 1
        penalty = torch.eye(size + 1).double() * PENALTY * self.xx.diagonal()[:-1].mean()
        penalty[size, size] = 0
        found = torch.linalg.solve(self.xx + penalty, self.xy)
        return found[:-1].T, found[-1]


def calibrate(model, documents: list[list[int]], share: float, recent: int, show=lambda line: None):
    """(tensors, about) of a profile: the linear model of every layer, and the threshold at which this share
    of the tokens of documents that were not fitted is held, the newest `recent` of each among them.
    ValueError for a model without RoPE, and for a share that these newest ones fill."""
    held_out = documents[::HELD_OUT]
    fitted = [document for index, document in enumerate(documents) if index % HELD_OUT]
    newest = sum(min(len(ids), recent) for ids in held_out) / sum(map(len, held_out))
    if share <= newest:
        raise ValueError(f"share={share}: the newest {recent} tokens of a text are {newest:.0%} of it")
    shape = ModelShape.of(model)
    numbers = shape.kv_heads * (shape.head_dim + shape.value_dim)
    fits = [Ridge(numbers, shape.kv_heads) for _ in rotations_of(model)]
    for order, x, y in heard(model, fitted):
        fits[order].add(x, y)
    weight, bias = map(torch.stack, zip(*(fit.solve() for fit in fits), strict=True))
    guessed, told, total = [], [], 0
    for order, x, y in heard(model, held_out):
        guess = x @ weight[order].T + bias[order]
        guessed.append(guess[:-recent].flatten())
        told.append(y[:-recent].flatten())
        total += y.numel()
    guessed, told = torch.cat(guessed), torch.cat(told)
    explained = 1 - float((told - guessed).square().mean() / told.var(correction=0))
    show(f"{explained:.1%} of the variance of the scores' logs is guessed, in texts that were not fitted")
    threshold = threshold_for(guessed, round(share * total) - (total - len(guessed)))
    about = {"threshold": threshold, "share": share, "recent": recent, "documents": len(documents)}
    return {"weight": weight.float(), "bias": bias.float()}, about


def threshold_for(guessed: Tensor, stay: int) -> float:
    """The weight above which so many of these logs lie, half way to the next one that is no rounding away:
    the same word has the same guess in the first layer."""
    if not 0 < stay < len(guessed):
        raise ValueError(f"share: of {len(guessed)} tokens and heads that are judged, {stay} would stay")
    edge = guessed.sort(descending=True).values[stay - 1]
    below = guessed[guessed < edge - 1e-4].amax()
    return min(1.0, float(((edge + below) / 2).exp()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m course.recipes.kvzap", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a model with RoPE, by name or folder")
    parser.add_argument("--out", type=Path, required=True, help="file of the profile")
    parser.add_argument("--documents", type=int, default=120, help="texts that are read")
    parser.add_argument("--tokens", type=int, default=400, help="the longest text")
    parser.add_argument("--share", type=float, default=0.2, help="of the texts, that the threshold holds")
    parser.add_argument("--recent", type=int, default=16, help="newest tokens that are held in any case")
    given = parser.parse_args()
    try:
        make(given)
    except (ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: error: {one_line(error)}\n")


def make(given: argparse.Namespace) -> None:
    """Calibrate and write what the command line asks for. ValueError, one line, for bad input."""
    for name, least, unit in (("documents", 2, "texts"), ("tokens", 1, "tokens"), ("recent", 1, "tokens")):
        check_whole(f"--{name}", getattr(given, name), least, unit)
    check_number("--share", given.share, lambda x: 0 < x < 1, "a share between 0 and 1")
    profile.check_folder(given.out)
    model, tokenizer = kvlab.load(given.model, device="cpu", dtype="float32")
    began, texts = time.perf_counter(), documents(tokenizer, given.documents, given.tokens)
    tensors, about = calibrate(model, texts, given.share, given.recent, lambda line: print(line, flush=True))
    profile.write(given.out, KIND, model, tensors, **about)
    seconds = time.perf_counter() - began
    print(f"{given.out}: {given.share:.0%} are held at {about['threshold']:.2e}; {seconds:.0f} s")


if __name__ == "__main__":
    main()
