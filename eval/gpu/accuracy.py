"""Stage accuracy: a trained model on the GPU in bf16 beside itself on the CPU in fp32, question by question.

SmolLM2 where a folder of it was carried along (KVLAB_MODEL, or the pack's folder `model`), else the built-in
models: facts are asked for in documents, and stories are predicted token by token, through every method. The
CPU's numbers are made in the same run from the same weights. Equal within error: the answered parts differ
by at most two standard errors of a difference, and the mean loss by at most 1 %.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

import kvlab

from ..studies.questions import answered, held_out, questions
from .unit import FIRST, Unit

METHODS = ("full", "int8", "int4", "h2o", "snapkv", "infinigen")
LOSS = 0.01  # relative


def units(size: str) -> list[Unit]:
    names = ["workshop"] if size == "dry" else ["workshop", "workshop-opt"]
    if carried() is not None and size != "dry":
        names.insert(0, "carried")
    given = {"documents": 4, "tokens": 24, "stories": 2} if size == "dry" else {
        "documents": 100, "tokens": 128, "stories": 8,
    }  # fmt: skip
    methods = list(METHODS[:3] if size == "dry" else METHODS)
    return [Unit("accuracy", name, FIRST, 25, given | {"name": name, "methods": methods}) for name in names]


def carried() -> Path | None:
    """The folder of a model that was carried along."""
    named = os.environ.get("KVLAB_MODEL")
    return Path(named) if named and (Path(named) / "config.json").is_file() else None


def measure(bench, name: str, methods: list[str], documents: int, tokens: int, stories: int) -> dict:
    source = str(carried()) if name == "carried" else name
    found = {}
    for where, dtype in {("cpu", "float32"), (bench.device.type, "bfloat16")}:
        model, tokenizer = kvlab.load(source, device=where, dtype=dtype)
        prompts, answers = questions(tokenizer, documents)
        right = answered(model, prompts, answers, methods)
        ids = held_out(model, tokenizer, tokens, stories)
        found[where, dtype] = {method: (right[method][0], loss(model, ids, method)) for method in methods}
        del model
        bench.tidy()
    here, there = found[bench.device.type, "bfloat16"], found["cpu", "float32"]
    rows = [row(name, method, here[method], there[method], documents) for method in methods]
    same = sum(row["right"] for row in rows)
    return {"rows": rows, "line": f"{same} of {len(rows)} methods as on the CPU"}


@torch.inference_mode()
def loss(model, ids, method: str) -> float:
    """Mean loss in nats of all but the first quarter of the stories, predicted through the cache."""
    from kvlab.decode import Stepper

    from ..studies.questions import losses

    found = losses(Stepper(model, kvlab.make_cache(model, method)), ids, ids.shape[1] // 4)
    return sum(found) / len(found)


def row(name: str, method: str, here, there, documents: int) -> dict:
    """One method: answered parts and losses of both, and whether they are equal within error."""
    share = (here[0] + there[0]) / 2
    error = 2 * math.sqrt(2 * share * (1 - share) / documents)
    same = abs(here[0] - there[0]) <= max(error, 1 / documents) and abs(here[1] / there[1] - 1) <= LOSS
    return {
        "model": name, "method": method, "documents": documents, "answered": here[0],
        "answered_cpu": there[0], "error": error, "loss": here[1], "loss_cpu": there[1], "right": same,
    }  # fmt: skip
