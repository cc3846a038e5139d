"""Our side: `python -m eval.peers.ours JOB`, see `side.py`."""

from __future__ import annotations

import copy

import torch

import kvlab
from kvlab.decode import Stepper

from .side import serve


class Ours:
    """A method on a loaded model. method: without its budget, unless it has none."""

    def __init__(self, model, method: str):
        self.model, self.method = model, method

    def prefill(self, ids: torch.Tensor, kept: int) -> Stepper:
        method = self.method
        if method != "full":
            method += f"{',' if ':' in method else ':'}budget={kept}"
        cache = kvlab.make_cache(self.model, method)
        stepper = Stepper(self.model, cache)
        stepper.feed(ids, last=True)
        cache.hold()
        return stepper

    def step(self, stepper: Stepper, token: int, place: int) -> torch.Tensor:
        return stepper.feed(torch.tensor([[token]]), last=True)[0]

    def held(self, stepper: Stepper, ids: torch.Tensor, kept: int) -> list[list[list[int]]]:
        return [
            [sorted(at for at in head if 0 <= at < ids.shape[1]) for head in layer.positions[0].tolist()]
            for layer in stepper.cache.layers
        ]

    def size(self, stepper: Stepper) -> int:
        return stepper.cache.stats().device_bytes

    def copy(self, stepper: Stepper) -> Stepper:
        return copy.deepcopy(stepper, {id(self.model): self.model})


def load(job: dict):
    model, _ = kvlab.load(job["model"], device="cpu", dtype="float32")
    return lambda run: Ours(model, run["method"])


if __name__ == "__main__":
    serve(load)
