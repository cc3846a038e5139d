"""The measurement `gpu`: units of five stages, the most telling first, within a time; a cell is one unit."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from kvlab.measure.host import cores

from ..core.digests import code_digest, digest
from ..core.errors import Failed, Problem
from ..core.files import write_json
from ..core.measurement import Cell, Measurement, flag, option
from ..core.results import Store
from . import precompile
from .pack import pack
from .unit import Unit
from .worker import MODULES, Worker

STAGES = tuple(MODULES)
MINUTES = 9.0
LEAST, TIMES = 60.0, 4.0  # a unit may take so many seconds, or so many times what it should
DRY_UNIT = 300.0  # seconds that a unit may take on a CPU
COMPILERS, COMPILING = 12, 60.0  # processes that compile at first, and for how long at most, seconds
LAST = 5.0  # seconds before the end after which nothing is begun
FILE = "gpu.json"


@dataclass(kw_only=True)
class Gpu(Measurement):
    """The units of the chosen stages. They are measured by rank, and within a rank in the order of the
    stages, so that a run that ends early has the most telling ones of every stage."""

    name = home = "gpu"
    needs = ()
    about = "measure what needs a GPU, in five stages (gpu.json)"

    stages: tuple[str, ...] = option(f"{', '.join(STAGES)} (default: all)", (), many=True, metavar="STAGE")
    minutes: float = option("stop after this many minutes, best parts first", MINUTES, type=float)
    dry: bool = flag("try all stages in small on the CPU, Triton interpreted")
    pack: Path | None = option(  # noqa: RUF009
        "write a pack for a machine without a network into this folder", type=Path
    )

    _machine: dict = field(default_factory=dict, init=False, repr=False)  # what the worker says of it
    _failed: list = field(default_factory=list, init=False, repr=False)
    _left_out: list = field(default_factory=list, init=False, repr=False)
    _begun: float = field(default=0.0, init=False, repr=False)
    _worker: Worker | None = field(default=None, init=False, repr=False)

    @property
    def folder(self) -> Path:
        return self.out or Path("results") / ("gpu-dry" if self.dry else "gpu")

    def check(self) -> None:
        self._begun = time.monotonic()
        for name in self.stages:
            if name not in STAGES:
                raise Problem(f"--stages {name}: expected one of {', '.join(STAGES)}")
        if not 0 < self.minutes < 1e6:
            raise Problem(f"--minutes {self.minutes:g}: expected a number above 0")
        if self.pack is not None or self.dry:
            return
        import torch

        if not torch.cuda.is_available():
            raise Problem(
                f"torch {torch.__version__} finds no CUDA device here; --dry tries every stage on the CPU"
            )

    def units(self) -> list[Unit]:
        """The units of the chosen stages, best first."""
        stages = [stage for stage in STAGES if stage in (self.stages or STAGES)]
        size = "dry" if self.dry else "real"
        found = [unit for stage in stages for unit in import_module(MODULES[stage], __package__).units(size)]
        return sorted(found, key=lambda unit: unit.rank)

    def cells(self) -> list[Cell]:
        """They count for this device, these versions and this code."""
        if self.pack is not None:
            return []
        if not self._machine:
            self._worker = Worker(self.dry, lambda line: print(f"  {line}", file=sys.stderr, flush=True))
            self._machine = self._worker.about()
        config = {name: self._machine[name] for name in ("device", "versions")}
        config |= {"code": [code_digest(), digest(Path(__file__).parent.glob("*.py"))]}
        return [
            Cell("random", "", unit.task, config | {"given": json.loads(json.dumps(unit.given))})
            for unit in self.units()
        ]

    def made(self, cells: list[Cell], bar) -> Iterator[tuple[Cell, dict | Failed]]:
        end = self._begun + 60 * self.minutes
        self.compile(cells, bar)
        units = {unit.task: unit for unit in self.units()}
        try:
            for cell in cells:
                unit, left = units[cell.task], end - time.monotonic()
                if left < (1.0 if self.dry else unit.seconds) + LAST:
                    self._left_out.append(self.label(cell))
                    continue
                bar.at(self.label(cell), 0)
                limit = DRY_UNIT if self.dry else max(LEAST, TIMES * unit.seconds)
                begun = time.perf_counter()
                try:
                    found = self._worker.ask(unit, min(limit, left))
                    if not found["rows"]:
                        raise Failed("; ".join(["nothing was measured", *found["notes"]]))
                    about = {"device": self._machine["device"], "seconds": time.perf_counter() - begun}
                    yield cell, found | about
                except Failed as error:
                    self._failed.append({"task": unit.task, "line": str(error), "traceback": error.details})
                    yield cell, error
                self.snapshot()
        finally:
            self._worker.stop()

    def compile(self, cells: list[Cell], bar) -> None:
        """Let many processes compile what would be compiled one by one, while no clock runs."""
        capability = self._machine.get("capability")
        stages = {cell.task.split(":")[1] for cell in cells}
        if not (capability and self._machine["versions"]["triton"] and stages & {"right", "attention"}):
            return
        bar.at("compiling kernels", 0)
        folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
        seconds = min(COMPILING, self._begun + 60 * self.minutes - LAST - time.monotonic())
        parts = max(1, min(COMPILERS, cores() - 1))
        precompile.together(folder, int(capability.replace(".", "")), parts, seconds)

    def snapshot(self) -> dict:
        """Write gpu.json: what is stored by now, and what failed."""
        store = Store(self.folder)
        stored = [cell for cell in map(store.load, self.cells()) if cell is not None]
        kept = ("rows", "notes", "seconds", "made", "commit")
        units = {
            cell["task"].removeprefix("gpu:"): {key: cell[key] for key in kept if key in cell}
            for cell in stored
        }
        found = {
            "machine": self._machine, "dry": self.dry, "units": units, "failed": self._failed,
            "left_out": self._left_out,
        }  # fmt: skip
        write_json(self.folder / FILE, found)
        return found

    def label(self, cell: Cell) -> str:
        return cell.task.removeprefix("gpu:")

    def result(self, found: dict) -> str:
        said = f" ({len(found['notes'])} notes)" if found.get("notes") else ""
        return f"{found.get('line', '')}{said}"

    def run(self, store, show) -> int:
        if self.pack is not None:
            for line in pack(self.pack):
                show.line(line)
            return 0
        failed = super().run(store, show)
        self._worker.stop()
        units = self.snapshot()["units"]
        if self._left_out:
            show.line(
                f"{len(self._left_out)} units were left out for want of time: {', '.join(self._left_out)}; "
                "the same command goes on with them"
            )
        show.line(f"everything is in {self.folder / FILE}")
        wrong = [
            name for name, unit in units.items() if any(row.get("right") is False for row in unit["rows"])
        ]
        if wrong:
            raise Failed(f"{len(wrong)} parts hold rows that are not right: {', '.join(wrong)}")
        return failed
