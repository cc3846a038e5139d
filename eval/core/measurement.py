"""Measurement: one kind of result, and the loop that makes the cells of every kind.

A measurement is a dataclass. Its fields are the options of its sub-command (`option` says how each is read),
`cells()` says which results are wanted and `made(cells, bar)` yields them as they come. `run` keeps what is
stored with the same configuration, makes the rest, and stores every result with its versions, commit and
machine.

Modules of measurements import nothing heavy at their top: a command line is answered from them.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from .digests import code_digest, method_digest, model_digest
from .errors import Failed, Problem
from .files import address
from .machine import commit, machine, versions

LONGEST = 9  # digits of a number on the command line
USUAL = 64  # rows decoded together
SMALL_MODEL = 200 * 2**20  # bytes on disk up to which one thread decodes fastest


@dataclass(frozen=True)
class Cell:
    """A wanted result; `config`: everything that must be the same for a stored one to count as this one."""

    model: str
    method: str  # a spec's text; "" for a study of several
    task: str
    config: dict = field(compare=False)


def option(text, default=None, **how):
    """A field that is an option: its help, and what `ArgumentParser.add_argument` is to know of it; `many`:
    several words, which spaces or commas separate."""
    return field(default=default, metadata={"help": text, **how})


def flag(text):
    """An option that is on where it is said."""
    return option(text, False, action="store_true")


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    if len(text) > LONGEST:
        raise argparse.ArgumentTypeError(f"{text[:12]}... is too large: expected at most {LONGEST} digits")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    if natural(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def rows_at_once(said: str | int) -> int:
    """A number of rows; lm-eval's "auto" is the usual one."""
    return USUAL if str(said).startswith("auto") else count(str(said))


@dataclass(kw_only=True)
class Measurement:
    """See the module's text."""

    name: ClassVar[str]  # the sub-command, and what its cells are called
    about: ClassVar[str]  # one line of help
    home: ClassVar[str] = "demo"  # the default folder in results/
    needs: ClassVar[tuple[str, ...]] = ("lm_eval", "pandas", "matplotlib")  # modules that extras bring

    out: Path | str | None = option(  # noqa: RUF009
        "folder or address for results, such as s3://BUCKET/NAME (default: results/NAME)", type=address
    )

    @property
    def folder(self) -> Path | str:
        """results/HOME, or results/NAME of another model; --limit has a folder of its own."""
        if self.out is not None:
            return self.out
        model, limit = getattr(self, "model", None), getattr(self, "limit", None)
        name = self.home
        if model:
            name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", model.strip("/").split("/")[-1]) or "model"
        return Path("results") / (f"{name}-limit{limit}" if limit else name)

    @property
    def threads(self) -> int | None:
        """torch's threads in a process that makes cells; None: its default."""
        return None

    def check(self) -> None:
        """Raises Problem or ValueError, with one clear line, for options that cannot be."""

    def cells(self) -> list[Cell]:
        """The wanted results; none where none is made."""
        return []

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        """Every cell with its numbers or why there are none, as they come; `bar.at(what, part)` says how far
        it is."""
        raise NotImplementedError

    def work(self, cell: Cell) -> float:
        """How long a cell takes beside others of its kind, as far as that is known."""
        return 1.0

    def label(self, cell: Cell) -> str:
        """What a line calls a cell."""
        return " on ".join(part for part in (cell.method, cell.task) if part)

    def result(self, found: dict) -> str:
        """What a line says of a cell's numbers."""
        return f"{len(found['rows'])} rows" if "rows" in found else ""

    def run(self, store, show) -> int:
        """Make the cells that are missing; returns how many could not be made."""
        with show.waiting(f"{self.name}: looking at what there is"):
            cells = self.cells()
        missing = store.missing(cells)
        show.kept(len(cells) - len(missing), len(cells), f"{self.name} cells")
        failed = 0
        with show.bar(self.name, len(missing), sum(map(self.work, missing))) as bar:
            for cell, found in self.made(missing, bar) if missing else ():
                label, result = self.label(cell), None
                if isinstance(found, Failed):
                    failed += 1
                    show.failed(label, found)
                else:
                    store.save(record(cell, found, self.threads))
                    result = self.result(found)
                bar.done(label, result, self.work(cell))
        return failed


@dataclass(kw_only=True)
class OnModel(Measurement):
    """A measurement that loads a model; `model` None is the workshop model."""

    several: ClassVar[bool] = False  # devices at a time

    model: str | None = option("folder, hub id, smollm2 or .gguf file (default: the built-in workshop model)")
    device: str | None = option(
        "cpu, cuda or cuda:N (default: cuda if there is one); for accuracy also several, a process on each: "
        "cuda:0,cuda:1"
    )
    dtype: str | None = option(
        "number type (default: float32 on a CPU)", choices=["float32", "bfloat16", "float16"]
    )
    limit: int | None = option("most documents per task, with fewer repeats and contexts", type=count)

    def __post_init__(self):
        if self.model == "workshop":
            self.model = None

    @property
    def model_name(self) -> str:
        return "workshop" if self.model is None else self.model.rstrip("/")

    @property
    def devices(self) -> list[str | None]:
        """The devices that --device names; [None]: the usual one."""
        return [None] if self.device is None else self.device.split(",")

    def small(self) -> bool:
        """Is it a model for one thread on a CPU?"""
        if not {None, "cpu"}.issuperset(self.devices):
            return False
        from kvlab.models import source_of

        folder = Path(source_of(self.model))
        return folder.is_dir() and sum(f.stat().st_size for f in folder.glob("*")) < SMALL_MODEL

    def configuration(self, method: str | None = None, **more) -> dict:
        """A cell's `config`: digests of the model, of the code, and of what a method uses that is not
        kvlab's; the settings that all share, and `more`."""
        device = self.device and self.device.partition(":")[0].partition(",")[0]
        here = getattr(self, "on", None) is None  # or a node of a cluster says where it computes
        return {
            "model": model_digest(self.model),
            "code": code_digest(),
            "method": method,
            "device": "cuda" if device is None and here and self.on_gpu() else device,
            "dtype": self.dtype,
            "limit": self.limit,
            **more,
        }

    def on_gpu(self) -> bool:
        """Whether the model is on a GPU, named or not."""
        import torch

        return torch.cuda.is_available() if self.device is None else self.device.startswith("cuda")

    def engine_here(self) -> str:
        """The engine where none is named: a GPU's steps are replayed where they can be."""
        return "graph" if self.on_gpu() else "eager"

    def check(self) -> None:
        if self.device is None:
            return
        import torch

        if len(self.devices) > 1 and not self.several:
            raise Problem(f"--device {self.device!r}: {self.name} is made on one device")
        try:
            devices = [torch.device(one) for one in self.devices]
        except RuntimeError:
            raise Problem(f"--device {self.device!r}: expected cpu, cuda or cuda:N") from None
        if len({device.type for device in devices}) > 1:
            raise Problem(f"--device {self.device!r}: expected devices of one kind")
        for device in devices:
            if device.type == "cuda" and not torch.cuda.is_available():
                raise Problem(f"--device {self.device!r}: torch finds no CUDA device on this machine")
            if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
                raise Problem(f"--device {self.device!r}: there are {torch.cuda.device_count()} devices")


@dataclass(kw_only=True)
class OfMethods(OnModel):
    """A measurement of several methods."""

    methods: tuple[str, ...] = option(
        "methods, for example: full int4 h2o:budget=0.2,recent=0.5", (), many=True, metavar="METHOD"
    )

    budgets: tuple[str, ...] = option(
        "budgets for methods that take one and name none, such as 0.05,0.1,0.2,0.4",
        (),
        many=True,
        metavar="BUDGET",
    )

    @cached_property
    def specs(self) -> list:
        """The methods' Specs, read once; by default those of the first wave. A method with a budget that
        names none is there once for each of `budgets`. Problem for budgets that no method takes."""
        from kvlab.methods import FIRST_WAVE
        from kvlab.spec import parse

        found, taken = [], False
        for spec in (parse(method) for method in self.methods or FIRST_WAVE):
            several = [spec]
            if self.budgets and "budget" in spec.method.parameters and "budget" not in spec.parameters:
                joint, taken = "," if ":" in spec.text else ":", True
                several = [parse(f"{spec.text}{joint}budget={budget}") for budget in self.budgets]
            found += several
        if self.budgets and not taken:
            raise Problem(
                f"--budgets {' '.join(self.budgets)}: none of the methods has a budget that it does not name"
            )
        return found

    @cached_property
    def codes(self) -> dict[str, str | None]:
        """{a spec's text: the digest of what its method uses that is not kvlab's}."""
        return {spec.text: method_digest(spec) for spec in self.specs}

    def __getstate__(self) -> dict:
        """What goes to another process, which reads the methods for itself: a Spec holds functions."""
        return {name: value for name, value in vars(self).items() if name != "specs"}

    def check(self) -> None:
        super().check()
        from kvlab.finding import METHODS, PROFILED

        for spec in self.specs:
            if spec.name in METHODS | PROFILED:  # values that no model could take
                try:
                    spec.policies()
                except (TypeError, ValueError) as error:
                    raise Problem(f"method {spec.text!r}: {error}") from error


def record(cell: Cell, found: dict, threads: int | None) -> dict:
    """A cell as it is stored: names, configuration, the numbers found, and their provenance."""
    found = {"versions": versions(), "commit": commit()} | found  # elsewhere they may be others
    device = found.pop("device")
    if "machine" not in found:
        found["machine"] = machine(device, threads)
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return vars(cell) | found | {"made": made}
