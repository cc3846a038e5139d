"""`python -m eval offload`: the measurements of document 001, each beside the published number.

Writes `offload.json`, a list of rows {experiment, system, tokens, value, unit, kind, published}, one figure
for each experiment, and timelines of the modelled link as pictures and as trace files for Perfetto.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..machine import Problem, machine
from ..results import stored_rows, write_json

EXPERIMENTS = (
    "similarity", "recall", "sensitivity", "latency", "breakdown", "link", "pool", "bandwidth", "accuracy",
)  # fmt: skip
FILE = "offload.json"
SOURCES = {  # which module holds an experiment
    "insight": ("similarity", "recall"),
    "quality": ("sensitivity", "pool", "accuracy"),
    "timing": ("latency", "breakdown", "bandwidth"),
    "walltime": ("link",),
}


@dataclass
class Settings:
    """What an experiment may ask for. tokens, layers and repeats are of experiment `link`."""

    model: str | None
    out: Path
    device: str | None = None
    dtype: str | None = None
    limit: int | None = None  # documents
    tokens: int | None = None
    layers: int | None = None
    repeats: int = 7
    line: Callable[[str], None] = print

    @property
    def name(self) -> str:
        return self.model or "workshop"

    @property
    def models(self) -> list[str]:
        """The model, or by default every workshop model."""
        if self.model is not None:
            return [self.model]
        from kvlab.models import WORKSHOP

        return ["workshop", *(["workshop-opt"] if any(WORKSHOP.glob("checkpoint-opt*")) else [])]

    def load(self, name: str | None = None):
        """(model, tokenizer), loaded once."""
        import kvlab

        name = name or self.name
        loaded = self.__dict__.setdefault("_loaded", {})
        if name not in loaded:
            loaded[name] = kvlab.load(name, device=self.device, dtype=self.dtype)
        return loaded[name]

    def context(self, model) -> int:
        """Tokens the model takes."""
        from kvlab.models import ModelShape

        return ModelShape.of(model).context or 2048


def experiment(name: str):
    """The function of an experiment."""
    from importlib import import_module

    module = next(module for module, names in SOURCES.items() if name in names)
    return getattr(import_module(f".{module}", __package__), name)


def run(names: list[str], settings: Settings, line=print) -> list[dict]:
    """Run experiments one after the other; rows of others that the file holds stay. Returns all rows."""
    import torch

    from . import figures

    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown:
        raise Problem(f"--experiments {unknown[0]}: expected one of {', '.join(EXPERIMENTS)}")
    settings.out.mkdir(parents=True, exist_ok=True)
    settings.line, threads = line, torch.get_num_threads()
    torch.set_num_threads(1)  # the link's threads have the other cores
    try:
        rows = stored_rows(settings.out / FILE, EXPERIMENTS)
        for name in names:
            line(f"{name} ...")
            found = [row.json() for row in experiment(name)(settings)]
            rows = [row for row in rows if row["experiment"] != name] + found
            rows.sort(key=lambda row: EXPERIMENTS.index(row["experiment"]))
            write_json(settings.out / FILE, rows)
            for row in found:
                line(text(row))
    finally:
        torch.set_num_threads(threads)
    write_json(settings.out / "offload-machine.json", machine(settings.device or "cpu", threads=1))
    figures.write(rows, settings.out)
    return rows


def text(row: dict) -> str:
    """A row as one line."""
    tokens = "" if row["tokens"] is None else f" at {row['tokens']:,} tokens"
    published = "" if row["published"] is None else f" (published {row['published']:g})"
    return f"  {row['system']}{tokens}: {row['value']:.4g} {row['unit']}, {row['kind']}{published}"
