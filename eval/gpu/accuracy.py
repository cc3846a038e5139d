"""Stage accuracy: a trained model on the GPU in bf16 beside itself on a CPU in fp32, question by question.

SmolLM2 where a folder of it was carried along (KVLAB_MODEL, or the pack's folder `model`), else the built-in
models: facts are asked for in documents, and stories are predicted token by token, through every method, each
in a unit of its own. What the built-in models say on a CPU is stored beside this file (`python -m
eval.gpu.accuracy` makes it again, in minutes) and counts for the same weights and questions; what is not
stored is made beside. Equal within error: the answered parts differ by at most two standard errors of a
difference, and the mean loss by at most 1 %.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch

import kvlab

from ..core.digests import model_digest
from ..studies.questions import answered, held_out, questions
from .unit import LAST, NEXT, Unit

METHODS = ("full", "int8", "int4", "h2o", "snapkv", "infinigen")
BUILT_IN = {"workshop": NEXT, "workshop-opt": LAST}
GIVEN = {"documents": 100, "tokens": 128, "stories": 8}
DRY = {"documents": 4, "tokens": 24, "stories": 2}
STORED = Path(__file__).with_name("accuracy_cpu.json")
LOSS = 0.01  # relative


def units(size: str) -> list[Unit]:
    if size == "dry":
        return [
            Unit("accuracy", f"workshop, {method}", NEXT, 10, DRY | {"name": "workshop", "method": method})
            for method in METHODS[:3]
        ]
    names = dict(BUILT_IN)
    if carried() is not None:
        names["carried"] = NEXT
    return [
        Unit("accuracy", f"{name}, {method}", rank, 5 if name in BUILT_IN else 40,
             GIVEN | {"name": name, "method": method})
        for name, rank in names.items()
        for method in METHODS
    ]  # fmt: skip


def carried() -> Path | None:
    """The folder of a model that was carried along."""
    named = os.environ.get("KVLAB_MODEL")
    return Path(named) if named and (Path(named) / "config.json").is_file() else None


def measure(bench, name: str, method: str, documents: int, tokens: int, stories: int) -> dict:
    bench.clear()
    source = str(carried()) if name == "carried" else name
    given = {"documents": documents, "tokens": tokens, "stories": stories}
    there = stored(source, method, given)
    if there is None:
        there = found(source, method, given, "cpu", "float32")
    here = found(source, method, given, bench.device.type, "bfloat16")
    line = row(name, method, here, there, documents)
    said = "as" if line["right"] else "not as"
    return {"rows": [line], "line": f"{here[0]:.0%} answered, {said} on the CPU ({there[0]:.0%})"}


def found(source: str, method: str, given: dict, device: str, dtype: str) -> tuple[float, float]:
    """(Part of the questions that is answered, mean loss in nats) on a device."""
    model, tokenizer = kvlab.load(source, device=device, dtype=dtype)
    right = answered(model, *questions(tokenizer, given["documents"]), [method])
    ids = held_out(model, tokenizer, given["tokens"], given["stories"])
    return right[method][0], loss(model, ids, method)


def stored(source: str, method: str, given: dict) -> tuple[float, float] | None:
    """What a CPU said of the same weights and questions, where that is known."""
    kept = json.loads(STORED.read_text(encoding="utf-8")).get(source)
    if kept is None or kept["given"] != given or kept["model"] != model_digest(source):
        return None
    return tuple(kept["found"][method])


def make() -> None:
    """Ask the built-in models on this CPU, and store what they say."""
    torch.set_num_threads(1)
    kept = {}
    for name in BUILT_IN:
        said = {}
        for method in METHODS:
            said[method] = found(name, method, GIVEN, "cpu", "float32")
            print(name, method, *said[method], file=sys.stderr, flush=True)
        kept[name] = {"given": GIVEN, "model": model_digest(name), "torch": torch.__version__, "found": said}
        STORED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    make()
