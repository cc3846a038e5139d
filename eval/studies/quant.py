"""Accuracy against bits, and the cost of re-quantizing.

    bits    questions answered and perplexity against true bits per value
    drift   perplexity and error after 1,500 decoded tokens, stored once or re-quantized at every step

Bits per value are measured: the bytes of the tensors that a cache holds, scales, zero points and windows
included, over the numbers it represents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

import kvlab
from kvlab.decode import Stepper
from kvlab.models import ModelShape
from kvlab.spec import Spec
from kvlab.store import Growing, Int
from kvlab.store.growing import GrowingState

from ..accuracy.taskset import stories
from .questions import answered, held_out, losses, perplexity, questions

DOCUMENTS, STORY = 200, 280  # questions; tokens of a story, of which the first quarter is prompt
PROMPT, DECODED, TEXTS = 64, 1500, 2  # drift: tokens prefilled, tokens decoded, texts
MEASURED = 1024  # tokens at which bits per value are measured
LAST = 250  # drift: tokens that a point of the curve averages


def row(experiment: str, method: str, metric: str, value: float, unit: str, tokens: int) -> dict:
    """One row of `quant.json`."""
    names = ("experiment", "method", "metric", "value", "unit", "tokens")
    return dict(zip(names, (experiment, method, metric, value, unit, tokens), strict=True))


class Requantized(Growing):
    """The behaviour of some runtimes with one scale per buffer: at every step everything held is decoded and
    quantized again with one scale, so a new largest value rounds everything again."""

    def start(self, layer) -> RequantizedState:
        return RequantizedState(self)


class RequantizedState(GrowingState):
    """changes: steps at which the scale of K changed in the first row."""

    changes = 0

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None) -> None:
        before = self.fixed_keys
        if self.keys is not None:
            held = self.read(keys.device)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(held, (keys, values), strict=True))
            self.keys = self.values = None
            self.fixed_keys = self.fixed_values = ()
        super().append(keys, values)
        self.changes += bool(before) and not torch.equal(before[0][0], self.fixed_keys[0][0])


def bits_per_value(model, method: str | Spec, tokens: int = MEASURED) -> float:
    """Bits held for every number of K and V after a prompt of `tokens` and one step."""
    cache = kvlab.make_cache(model, method)
    stepper = Stepper(model, cache)
    stepper.feed(
        torch.full((1, tokens - 1), 5, device=model.device) + torch.arange(tokens - 1).to(model.device) % 50
    )
    stepper.feed(torch.full((1, 1), 5, device=model.device))
    shape = ModelShape.of(model)
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim * tokens
    return 8 * cache.stats().device_bytes / numbers


def bits(study) -> Iterator[dict]:
    """Questions answered (recall, per cent) and perplexity of held-out stories, with true bits per value."""
    model, tokenizer = study.load()
    prompts, answers = questions(tokenizer, study.limit or DOCUMENTS)
    length = round(statistics.mean(map(len, prompts)))
    text = held_out(model, tokenizer, STORY, study.limit)
    measured = min(MEASURED, ModelShape.of(model).context or MEASURED)
    for method, (right, _) in answered(model, prompts, answers, study.specs).items():
        yield row("bits", method, "accuracy", 100 * right, "%", length)
    for spec in study.specs:
        held = bits_per_value(model, spec, measured)
        yield row("bits", spec.text, "bits per value", held, "bits", measured)
        yield row("bits", spec.text, "perplexity", perplexity(model, text, spec), "", STORY)


def ways() -> dict[str, Growing | None]:
    """The stores that `drift` compares: a scale per token and head, or one for all of K and of V of a layer,
    fixed by the prompt or found again at every step."""
    found: dict[str, Growing | None] = {"full": None}
    for width in (8, 4):
        found[f"int{width}, scale per token"] = Growing(Int(width))
        for name, store in (("stored once", Growing), ("re-quantized", Requantized)):
            found[f"int{width}, {name}"] = store(Int(width, axis="tensor"))
    return found


@torch.inference_mode()
def drift(study) -> Iterator[dict]:
    """Perplexity of stretches of a long text, and at the end the error of what is held."""
    model, tokenizer = study.load()
    decoded = min(study.limit or DECODED, (ModelShape.of(model).context or DECODED + PROMPT) - PROMPT)
    ids = [token for story in stories() for token in tokenizer(story).input_ids]
    size = PROMPT + decoded
    ids = (ids * (1 + TEXTS * size // len(ids)))[: TEXTS * size]
    ids = torch.tensor(ids, device=model.device).view(TEXTS, size)
    exact = None
    for name, store in ways().items():
        cache = kvlab.KVCache(model, store=store)
        nats = losses(Stepper(model, cache), ids, PROMPT)
        for end in range(min(LAST, decoded), decoded + 1, LAST):
            value = math.exp(statistics.mean(nats[max(0, end - LAST) : end]))
            yield row("drift", name, "perplexity", value, "", end)
        held = cache.layers[0].store.read(ids.device)  # what the first layer stores depends on no other layer
        exact = held if exact is None else exact
        if isinstance(store, Requantized):
            changes = statistics.mean(layer.store.changes for layer in cache.layers)
            yield row("drift", name, "changes of K's scale", changes, "per layer", size)
        for what, ours, true in zip(("K", "V"), held, exact, strict=True):
            error = 100 * ((ours - true).norm() / true.norm()).item()
            yield row("drift", name, f"error of {what} in layer 0", error, "%", size)


EXPERIMENTS = {
    "bits": lambda study: {"rows": list(bits(study))},
    "drift": lambda study: {"rows": list(drift(study))},
}
