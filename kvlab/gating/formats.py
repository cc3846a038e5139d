"""Formats: the cost of rounding for a model, in nats from its own full cache, token by token."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from .reading import Reading

BLOCK = 11  # consecutive tokens whose mean is one sample of the error estimate
TOLD = 22  # tokens of the full cache from one line about it to the next
SURE = 1.96  # standard errors on either side of a mean: 95 %


@dataclass(frozen=True)
class Cost:
    """nats: Kullback-Leibler divergence of the next token's probabilities from those of the full cache, mean
    over tokens, and its 95 % interval over blocks of tokens. agrees: share of tokens of which the most
    probable is the same."""

    nats: float
    low: float
    high: float
    agrees: float
    seconds: float


@torch.no_grad()
def decoded(reading: Reading, rest: Tensor, say) -> list[Tensor]:
    """The full cache's log-probabilities `[rows, vocabulary]` after each token of `rest` `[rows, tokens]`,
    fed one by one behind what was read."""
    stepper, found, tokens = reading.taken("full"), [], rest.shape[1]
    for at in range(tokens):
        if at % TOLD == 0:
            say(f"the full cache, token {at + 1} of {tokens}")
        found.append(stepper.feed(rest[:, at : at + 1], last=True).log_softmax(-1))
    return found


@torch.no_grad()
def cost(reading: Reading, method, rest: Tensor, right: list[Tensor]) -> Cost:
    """A method's cost on these tokens; `right`: the full cache's log-probabilities."""
    began = time.perf_counter()
    stepper = reading.taken(method)
    said = [stepper.feed(rest[:, at : at + 1], last=True).log_softmax(-1) for at in range(rest.shape[1])]
    seconds = time.perf_counter() - began
    return Cost(**divergence(said, right), seconds=seconds)


def divergence(said: list[Tensor], right: list[Tensor]) -> dict[str, float]:
    """How far log-probabilities `[rows, vocabulary]` after each token are from the right ones: `nats`, `low`,
    `high` and `agrees` of a `Cost`."""
    pairs = list(zip(said, right, strict=True))
    nats = torch.stack([(b.exp() * (b - a)).sum(-1) for a, b in pairs]).double()  # [tokens, rows]
    same = torch.stack([a.argmax(-1) == b.argmax(-1) for a, b in pairs]).double()
    blocks = torch.stack([block.mean(0) for block in nats.split(BLOCK)]).flatten()
    error, mean = float(blocks.std()) / math.sqrt(len(blocks)), float(nats.mean())
    low, high = max(0.0, mean - SURE * error), mean + SURE * error
    return {"nats": mean, "low": low, "high": high, "agrees": float(same.mean())}
