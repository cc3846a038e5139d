"""The measurement `gpu`: units of seven stages, the best first, within a time; a cell is one unit."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from ..core.digests import ROOT, code_digest
from ..core.errors import Failed, Problem
from ..core.files import write_json
from ..core.machine import cores
from ..core.measurement import Cell, Measurement, option
from ..core.results import Store
from . import precompile
from .unit import Unit
from .worker import Worker

STAGES = ("right", "attention", "step", "link", "headline", "throughput", "accuracy")
MINUTES = 9.0
LEAST, TIMES = 60.0, 4.0  # a unit may take so many seconds, or so many times what it should
DRY_UNIT = 300.0  # seconds that a unit may take on a CPU
COMPILERS, COMPILING = 12, 60.0  # processes that compile at first, and for how long at most, seconds
LAST = 5.0  # seconds before the end after which nothing is begun
FILE = "gpu.json"


def minutes(text: str) -> float:
    """A time above zero."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0")
    return found


def unpacking() -> float:
    """Seconds since a pack's `run` was begun, which count; else 0."""
    begun = os.environ.get("KVLAB_BEGUN", "")
    return max(0.0, time.time() - float(begun)) if begun.isdigit() else 0.0


@dataclass(kw_only=True)
class Gpu(Measurement):
    """The units of the chosen stages. They are measured by rank, and within a rank in the order of the
    stages, so that a run that ends early has the most telling ones of every stage."""

    name = home = "gpu"
    about = "what only a GPU can answer, in seven stages (gpu.json; --report: docs/gpu.md)"
    makers = {stage: f"eval.gpu.{stage}" for stage in STAGES}

    stages: tuple[str, ...] = option(f"{', '.join(STAGES)} (default: all)", (), many=True, metavar="STAGE")
    minutes: float = option("end cleanly after so long, the best first", MINUTES, type=minutes)
    dry: bool = option("all stages in small on the CPU, with Triton interpreted", False, action="store_true")
    pack: Path | None = option(  # noqa: RUF009
        "write what a machine without a network needs into this folder", type=Path
    )
    report: bool = option("write docs/gpu.md from docs/results/gpu/*.json", False, action="store_true")

    _found: dict = field(default_factory=dict, init=False, repr=False)  # what the worker says of its machine
    _failed: list = field(default_factory=list, init=False, repr=False)
    _left_out: list = field(default_factory=list, init=False, repr=False)
    _begun: float = field(default=0.0, init=False, repr=False)
    _worker: Worker | None = field(default=None, init=False, repr=False)

    @property
    def folder(self) -> Path:
        return self.out or Path("results") / ("gpu-dry" if self.dry else "gpu")

    @property
    def measures(self) -> bool:
        """Whether anything is to be measured."""
        return self.pack is None and not self.report

    def check(self) -> None:
        self._begun = time.monotonic() - unpacking()
        for name in self.stages:
            if name not in STAGES:
                raise Problem(f"--stages {name}: expected one of {', '.join(STAGES)}")
        if not self.measures or self.dry:
            return
        import torch

        if not torch.cuda.is_available():
            raise Problem(
                f"torch {torch.__version__} finds no CUDA device here; --dry tries every stage on the CPU"
            )

    def units(self) -> list[Unit]:
        """The units of the chosen stages, best first."""
        size = "dry" if self.dry else "real"
        found = [
            unit for stage in self.stages or STAGES for unit in import_module(self.makers[stage]).units(size)
        ]
        return sorted(found, key=lambda unit: unit.rank)

    def cells(self) -> list[Cell]:
        return [self.cell(unit) for unit in self.units()] if self.measures else []

    def cell(self, unit: Unit) -> Cell:
        """A unit's cell: it counts for this device, these versions and this code."""
        machine = self.machine()
        config = {
            "device": machine["device"],
            "versions": machine["versions"],
            "code": code_digest(),
            "given": json.loads(json.dumps(unit.given)),
        }
        return Cell("random", "", unit.task, config)

    def machine(self) -> dict:
        """What the worker says of its machine."""
        if not self._found:
            self._worker = Worker(self.dry, print_line)
            self._found.update(self._worker.about())
        return self._found

    def notes(self) -> list[str]:
        if not self.measures:
            return []
        return [f"{self._found['device']}: {line}" for line in self._found["missing"]]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        end = self._begun + 60 * self.minutes
        self.compile(cells, bar)
        units = {unit.task: unit for unit in self.units()}
        try:
            for cell in cells:
                unit, left = units[cell.task], end - time.monotonic()
                expected = 1.0 if self.dry else unit.seconds
                if left < expected + LAST:
                    self._left_out.append(unit.task.removeprefix("gpu:"))
                    continue
                bar.at(self.label(cell), 0)
                limit = DRY_UNIT if self.dry else max(LEAST, TIMES * unit.seconds)
                begun = time.perf_counter()
                try:
                    found = self._worker.ask(unit, min(limit, left))
                    if not found["rows"]:
                        raise Failed("; ".join(["nothing was measured", *found["notes"]]))
                    yield (
                        cell,
                        {"device": self._found["device"]} | found | {"seconds": time.perf_counter() - begun},
                    )
                except Failed as error:
                    self._failed.append({"task": unit.task, "line": str(error), "traceback": error.details})
                    yield cell, error
                self.snapshot()
        finally:
            self._worker.stop()

    def compile(self, cells: list[Cell], bar) -> None:
        """Let many processes compile what would be compiled one by one, while no clock runs."""
        capability = self._found.get("capability")
        if capability is None or self._found["versions"]["triton"] is None:
            return
        if not {"right", "attention"} & {cell.task.split(":")[1] for cell in cells}:
            return
        bar.at("compiling kernels", 0)
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        parts = max(1, min(COMPILERS, cores() - 1))
        processes = precompile.started(folder, int(capability.replace(".", "")), parts)
        until = min(time.monotonic() + COMPILING, self._begun + 60 * self.minutes - LAST)
        for process in processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def snapshot(self) -> None:
        """Write gpu.json: what is stored by now, and what failed."""
        store = Store(self.folder)
        stored = [cell for cell in map(store.load, self.cells()) if cell is not None]
        units = {
            cell["task"].removeprefix("gpu:"): {
                key: cell[key] for key in ("rows", "notes", "seconds", "made", "commit") if key in cell
            }
            for cell in stored
        }
        write_json(
            self.folder / FILE,
            {"machine": self._found, "dry": self.dry, "units": units, "failed": self._failed,
             "left_out": self._left_out},
        )  # fmt: skip

    def label(self, cell: Cell) -> str:
        return cell.task.removeprefix("gpu:")

    def result(self, found: dict) -> str:
        said = f" ({len(found['notes'])} notes)" if found.get("notes") else ""
        return f"{found.get('line', '')}{said}"

    def write(self, store, show, wanted: list[Cell]) -> None:
        if self.pack is not None:
            from .pack import pack

            for line in pack(self.pack):
                show.line(line)
        if self.report:
            from .report import write

            show.line(write(ROOT / "docs"))
        if not self.measures:
            return
        if self._worker is not None:
            self._worker.stop()
        self.snapshot()
        if self._left_out:
            show.line(
                f"{len(self._left_out)} units were left out for want of time: {', '.join(self._left_out)}; "
                "the same command goes on with them"
            )
        for failure in self._failed:
            show.line(f"failed: {failure['task']}: {failure['line']}")
        show.line(
            f"everything is in {self.folder / FILE}; python -m eval gpu --report shows what is in docs/"
        )
        if wrong := self.wrong():
            raise Failed(f"{len(wrong)} parts hold rows that are not right: {', '.join(wrong)}")

    def wrong(self) -> list[str]:
        """The parts that hold a comparison which came out wrong."""
        units = json.loads((self.folder / FILE).read_text(encoding="utf-8"))["units"]
        return [
            name for name, unit in units.items() if any(row.get("right") is False for row in unit["rows"])
        ]


def print_line(line: str) -> None:
    """A line of the worker's, for whoever watches."""
    print(f"  {line}", file=sys.stderr, flush=True)


__all__ = ["STAGES", "Gpu"]
