"""The result store: one JSON file per cell (model × method × task), atomic, resumable.

    OUT/cells/METHOD--TASK--HASH.json    one finished cell: config, numbers, machine, versions, commit
    OUT/summary.json                     [{model, method, task, metric, value, stderr, n}]
    OUT/speed.json                       [{model, method, context, prefill_ms, decode_ms, …}]

A cell is written to a temporary file and renamed, so a reader or an interrupted run never sees half of one.
HASH stands for model, method and task; the configuration (digests of model, code and data, and settings) is
kept inside and compared on resume. Studies have no method of their own: theirs is "".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .alike import SPEED, differences
from .errors import Problem, one_line

FIELDS = ("model", "method", "task", "config", "seconds", "machine", "versions")
WRITING = ".writing-"  # how the name of a temporary file begins
DAY = 24 * 3600.0  # seconds after which a temporary file belongs to no running process
RUN = "run.json"  # the command that made the folder


def finite(value):
    """NaN and infinities become None: they are not JSON, and a reader must not trip over them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: a temporary one in the same folder, flushed, then renamed. An OSError names
    `path`, whichever of the two it came from."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=WRITING, suffix=path.suffix)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror or one_line(error), str(path)) from error
        raise


def write_json(path: Path, data) -> None:
    """Write JSON atomically."""
    write_file(path, json.dumps(finite(data), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


class Store:
    """Cells of one output folder. `warn` receives one line for each cell that cannot be read."""

    def __init__(self, out: str | Path, warn: Callable[[str], None] = lambda line: None):
        self.out = Path(out)
        self.cells = self.out / "cells"
        self.warn = warn

    def prepare(self) -> None:
        """Make the folder and try a file in it. Raises Problem when it cannot be written."""
        try:
            self.cells.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.cells, prefix=WRITING):
                pass
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise Problem(f"--out {self.out}: the folder cannot be written ({reason})") from error
        for left in self.cells.glob(f"{WRITING}*"):  # another run's own are younger
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > DAY:
                    left.unlink()

    def path(self, model: str, method: str, task: str) -> Path:
        key = hashlib.sha256("\0".join((model, method, task)).encode()).hexdigest()[:8]
        name = "--".join(re.sub(r"[^A-Za-z0-9.=_+-]+", "_", part)[:60] for part in (method, task) if part)
        return self.cells / f"{name}--{key}.json"

    def load(self, wanted) -> dict | None:
        """The finished `Cell` with this very configuration, or None (missing, damaged, different)."""
        cell = self.stored(wanted)
        return cell if cell is not None and not differences(cell["config"], wanted.config) else None

    def stored(self, wanted) -> dict | None:
        """The cell of this model, method and task, whatever its configuration."""
        path = self.path(wanted.model, wanted.method, wanted.task)
        return self._read(path) if path.exists() else None

    def save(self, cell: dict) -> None:
        missing = [field for field in FIELDS if field not in cell]
        if missing:
            raise ValueError(f"cell: fields {missing} are missing; it needs {list(FIELDS)}")
        write_json(self.path(cell["model"], cell["method"], cell["task"]), cell)

    def _read(self, path: Path) -> dict | None:
        try:
            cell = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(cell, dict) or any(field not in cell for field in FIELDS):
                raise ValueError("it is not a complete cell")
            return cell
        except (OSError, ValueError) as error:
            self.warn(f"damaged cell {path.name}: {one_line(error)}; it is left out or made again")
            return None

    def records(self) -> Iterator[dict]:
        """Every readable cell, in the order of the file names."""
        for path in sorted(self.cells.glob("*.json")):
            cell = None if path.name.startswith(".") else self._read(path)
            if cell is not None:
                yield cell

    def write_tables(self, cells: list[dict] | None = None) -> tuple[list[dict], list[dict]]:
        """Write summary.json and speed.json from these cells (default: all) and return both lists of rows."""
        summary, speed = [], []
        for cell in self.records() if cells is None else cells:
            names = {key: cell[key] for key in ("model", "method", "task")}
            summary += [
                names | {key: row[key] for key in ("metric", "value", "stderr", "n")}
                for row in cell.get("metrics", [])
            ]
            if cell["task"].startswith(SPEED):
                head = {"model": cell["model"], "method": cell["method"]}
                speed += [head | row for row in cell.get("rows", [])]
        write_json(self.out / "summary.json", summary)
        write_json(self.out / "speed.json", speed)
        return summary, speed
