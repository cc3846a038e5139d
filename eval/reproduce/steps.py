"""The measurement `steps`: steps and prompts beside llama.cpp's and transformers'; a cell is of one model.

A cell's task is `steps:TOKENS`; `steps:weights=int8:TOKENS` of narrow weights, `steps:prompt:TOKENS` of whole
prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..core.digests import code_digest, model_digest
from ..core.errors import Failed, Problem
from ..core.measurement import Cell, Collected, count, option

ABOUT = (
    "Decode steps and prompts of llama.cpp, of transformers' caches and of kvlab's engines, timed in turn in "
    "one process"
)
OF_CELL = ("model", "shape", "context", "simd")  # what cells differ in
COLUMNS = ["model", "shape", "context", "threads", "engine", "method", "cpu_ms", "wall_ms", "fraction"]
ROUNDS = 8
CONTEXTS = dict.fromkeys(("workshop", "smollm2"), (256, 2048, 8192, 16384))
NARROW, NARROW_CONTEXTS = ("bf16", "int8"), (256, 2048)  # weights beside fp32
PROMPTS = {"workshop": (2048,), "smollm2": (2048, 8192)}  # tokens
STEPS = 8  # of a row in a round, at most


@dataclass(kw_only=True)
class Steps(Collected):
    """All rows of a cell are timed in turn, in this process (see `turns.py`)."""

    name = home = "steps"
    about = "time a decode step beside llama.cpp's and transformers' (docs/performance.md)"

    models: tuple[str, ...] = option(
        f"Llama-shaped models (default: {' '.join(CONTEXTS)})", tuple(CONTEXTS), many=True, metavar="MODEL"
    )
    contexts: tuple[str, ...] = option(
        "tokens held (default: 256 to 16,384, also beyond a model's own context)",
        (),
        many=True,
        metavar="TOKENS",
    )
    rounds: int = option("turns of every row", ROUNDS, type=count)
    _at: Callable | None = field(default=None, init=False, repr=False)  # what says how far a cell is

    def check(self) -> None:
        from kvlab.models import configuration

        least = STEPS * self.rounds + 1
        for context in self.contexts or map(str, CONTEXTS["smollm2"]):
            if not context.isdecimal() or int(context) < least:
                raise Problem(
                    f"--contexts {context}: expected a number of tokens of at least {least}, of which "
                    f"{least - 1} are steps"
                )
        for model in () if self.collect else self.models:
            configuration(named(model))  # else every one of its cells would say that there is none

    def cells(self) -> list[Cell]:
        from .llama import there

        code, beside, found = code_digest(), there(), []
        for model in self.models:
            config = {"model": model_digest(named(model)), "code": code, "method": None}
            config |= {"rounds": self.rounds, "llama.cpp": beside}  # once it is built, it is measured
            tasks = {"": self.contexts or CONTEXTS.get(model, CONTEXTS["smollm2"])}
            tasks |= {f"weights={kind}:": self.contexts or NARROW_CONTEXTS for kind in NARROW}
            tasks["prompt:"] = self.contexts or PROMPTS.get(model, PROMPTS["workshop"])
            found += [
                Cell(model, "", f"steps:{what}{n}", config) for what, some in tasks.items() for n in some
            ]
        return found

    def notes(self) -> list[str]:
        from .llama import LIBRARY, there

        if there():
            return []
        return [f"llama.cpp is left out: it is not built in {LIBRARY} (docs/performance.md says how)"]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        self._at = bar.at
        yield from super().made(cells, bar)

    def make(self, cell: Cell) -> dict:
        from . import turns

        shape, context = shape_of(cell.task), int(cell.task.rpartition(":")[2])
        weights = next((each.partition("=")[2] for each in shape if "=" in each), "fp32")
        return turns.measure(named(cell.model), context, self.rounds, self._at, weights, "prompt" in shape)

    def label(self, cell: Cell) -> str:
        context = cell.task.rpartition(":")[2]
        return ", ".join([f"steps of {cell.model} at {context} tokens", *shape_of(cell.task)])


def shape_of(task: str) -> list[str]:
    """What sets a cell apart from steps as they are."""
    return task.split(":")[1:-1]


def named(model: str) -> str | None:
    """A model as `kvlab.load` takes it."""
    return None if model == "workshop" else model


def named_rows(cells) -> Iterator[tuple[dict, dict]]:
    """(stored cell, one of its rows without the cell's provenance)."""
    tokens = lambda cell: int(cell["task"].rpartition(":")[2])
    for cell in sorted(cells, key=lambda cell: (cell["model"] != "workshop", tokens(cell))):
        about = {name: cell["about"].get(name) for name in ("simd", "compiled", "batch", "layers")}
        for row in cell["rows"]:
            yield cell, {"model": cell["model"], "shape": shape_of(cell["task"])} | about | row
