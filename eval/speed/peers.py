"""The measurement `steps`: steps and prompts beside llama.cpp's and transformers'; a cell is of one model.

A cell's task is `steps:TOKENS`; `steps:WHAT:TOKENS` where it is of narrow weights (`weights=int8`), a batch
(`batch=2`), another number of layers (`layers=4`), or of whole prompts (`prompt`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ..core.digests import ROOT, code_digest, model_digest
from ..core.errors import Failed, Problem
from ..core.measurement import Cell, Measurement, count, option

FILE = ROOT / "docs" / "results" / "speed.json"
ROUNDS = 8
CONTEXTS = dict.fromkeys(("workshop", "smollm2"), (256, 2048, 8192, 16384))
GROWING = {"batch": (2, 4, 8), "layers": (2, 4, 16)}  # of the workshop model, at the first of its contexts
NARROW, NARROW_CONTEXTS = ("bf16", "int8"), (256, 2048)  # weights beside fp32
PROMPTS = {"workshop": (2048,), "smollm2": (2048, 8192)}  # tokens
STEPS = 8  # of a row in a round, at most
MINUTES = {  # of all cells of a model on two quiet cores with llama.cpp, about: estimated, not measured
    "workshop": {"steps": 4, "batches and layers": 1, "narrow weights": 1, "prompt": 1},
    "smollm2": {"steps": 22, "narrow weights": 4, "prompt": 14},
}


@dataclass(kw_only=True)
class Steps(Measurement):
    """All rows of a cell are timed in turn, in this process (see `eval/speed/steps.py`)."""

    name = home = "steps"
    about = "a decode step beside llama.cpp's and transformers', one and two threads (docs/performance.md)"
    maker = "eval.speed.steps"

    models: tuple[str, ...] = option(
        f"Llama models (default: {' '.join(CONTEXTS)})", tuple(CONTEXTS), many=True, metavar="MODEL"
    )
    contexts: tuple[str, ...] = option(
        "tokens (default: 256 to 16,384; what lies beyond a model's own context takes as long as before it)",
        (),
        many=True,
        metavar="TOKENS",
    )
    rounds: int = option("turns that every row has with steps", ROUNDS, type=count)
    collect: bool = option(
        "write what is stored to docs/results/speed.json and into the documents, measure nothing",
        False, action="store_true",
    )  # fmt: skip

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
        return [] if self.collect else self.asked()

    def asked(self) -> list[Cell]:
        """The cells of these options, to be measured or to be collected."""
        from .llama import there

        code, beside = code_digest(), there()
        found = []
        for model in self.models:
            config = {"model": model_digest(named(model)), "code": code, "method": None}
            config |= {"rounds": self.rounds, "llama.cpp": beside}  # once it is built, it is measured
            contexts = self.contexts or CONTEXTS.get(model, CONTEXTS["smollm2"])
            tasks = [f"steps:{context}" for context in contexts]
            if model == "workshop" and not self.contexts:
                tasks += [f"steps:{what}={n}:{contexts[0]}" for what, sizes in GROWING.items() for n in sizes]
            tasks += [
                f"steps:weights={kind}:{context}"
                for context in self.contexts or NARROW_CONTEXTS
                for kind in NARROW
            ]
            prompts = self.contexts or PROMPTS.get(model, PROMPTS["workshop"])
            tasks += [f"steps:prompt:{context}" for context in prompts]
            found += [Cell(model, "", task, config) for task in tasks]
        return found

    def notes(self) -> list[str]:
        from .llama import LIBRARY, there

        if self.collect:
            return []
        found = []
        if not self.contexts and self.rounds == ROUNDS:
            found += [estimate(model) for model in self.models if model in MINUTES]
        if not there():
            found.append(
                f"llama.cpp is left out: it is not built in {LIBRARY} (docs/performance.md says how)"
            )
        return found

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        self._at = bar.at
        yield from super().made(cells, bar)

    def make(self, cell: Cell) -> dict:
        from . import prompts, steps

        _, *shape, context = cell.task.split(":")
        model, context = named(cell.model), int(context)
        if shape == ["prompt"]:
            return prompts.measure(model, context, self._at)
        how = dict(each.split("=") for each in shape)
        how = {what: int(size) if size.isdecimal() else size for what, size in how.items()}
        return steps.measure(model, context, self.rounds, self._at, **how)

    def label(self, cell: Cell) -> str:
        _, *shape, context = cell.task.split(":")
        return ", ".join([f"steps of {cell.model} at {context} tokens", *shape])

    def write(self, store, show, wanted: list[Cell]) -> None:
        from ..report.steps import draw, lines, of_level
        from ..reproduce.collect import read
        from ..reproduce.document import write_steps

        cells = [cell for cell in map(store.load, self.asked()) if cell]
        for line in lines(cells):
            show.line(line)
        if self.collect:
            write_steps(cells, FILE, True, show)
            if FILE.is_file():
                draw(of_level(read(FILE)), FILE.parent)


def named(model: str) -> str | None:
    """A model as `kvlab.load` takes it."""
    return None if model == "workshop" else model


def estimate(model: str) -> str:
    """A line: how long the cells of a model take."""
    parts = ", ".join(f"{what} {minutes}" for what, minutes in MINUTES[model].items())
    return f"{model}: about {sum(MINUTES[model].values())} minutes on two quiet cores ({parts})"
