"""The result store: one JSON file per cell (model × method × task), atomic, resumable.

    OUT/cells/METHOD--TASK--HASH.json    one finished cell: config, numbers, machine, versions, commit
    OUT/samples/METHOD--TASK--HASH.jsonl  what was asked and answered there, see `eval/accuracy/samples.py`
    OUT/summary.json                     [{model, method, task, protocol, limit, dtype, metric, value, …}]
    OUT/speed.json                       [{model, method, context, prefill_ms, decode_ms, …}]

A cell is written to a temporary file and renamed, so a reader or an interrupted run never sees half of one.
HASH is of model, method, task and the whole configuration (digests of model, code and data, and settings).
Cells of several protocols, limits or dtypes are beside each other in one folder, and none replaces another.
Studies have no method of their own: theirs is "". OUT is a folder or an address of fsspec; plots and tables
for an address are in a temporary folder until `publish`.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

from kvlab.parameters import from_json

from .cells import FIELDS, check_sample, parsed, sum_of, written
from .comparable import SPEED, differences
from .errors import Problem, one_line, shown
from .files import Folder, Remote, finite, folder_at, write_json

RUN = "run.json"  # the command that made the folder
NAMED = ("model", "method", "task", "config")  # what a cell's file is named by


class Store:
    """Cells of one output folder. `warn` receives one line, once, for each cell that cannot be read.

    out: the local folder of tables and figures; of an address a temporary one, which goes with the store.
    """

    def __init__(self, where: Path | str, warn: Callable[[str], None] = lambda line: None):
        self.where = where
        self.home = folder_at(where)
        self.remote = isinstance(self.home, Remote)
        self.files = folder_at(f"{where}/cells" if self.remote else Path(where) / "cells")
        self.logs = folder_at(f"{where}/samples" if self.remote else Path(where) / "samples")
        self.warn = cache(warn)
        self.read = partial(read, self.files, self.warn)
        self.out = Path(tempfile.mkdtemp(prefix="kvlab-out-")) if self.remote else Path(where)
        if self.remote:
            weakref.finalize(self, shutil.rmtree, self.out, ignore_errors=True)

    def prepare(self) -> None:
        """Make the folder and try a file in it. Raises Problem when it cannot be written."""
        try:
            self.files.prepare()
        except OSError as error:
            reason = error.strerror or one_line(error)
            raise Problem(f"--out {self.where}: the folder cannot be written ({reason})") from error
        if self.remote and (command := self.home.read(RUN)) is not None:
            (self.out / RUN).write_bytes(command)

    def publish(self) -> None:
        """Copy the temporary folder of an address there."""
        for path in sorted(self.out.iterdir()) if self.remote else ():
            if path.is_file():
                self.home.write(path.name, path.read_bytes())

    @staticmethod
    def name(model: str, method: str, task: str, config: dict) -> str:
        """The name of a cell's file."""
        key = hashlib.sha256(json.dumps([model, method, task, config], sort_keys=True).encode()).hexdigest()
        parts = (re.sub(r"[^A-Za-z0-9.=_+-]+", "_", part)[:60] for part in (method, task) if part)
        return "--".join([*parts, f"{key[:12]}.json"])

    def load(self, wanted) -> dict | None:
        """The finished `Cell` with this very configuration, or None (missing, damaged, changed by hand)."""
        cell = self.read(self.name(**vars(wanted)))
        return cell if cell is not None and not differences(cell["config"], wanted.config) else None

    def missing(self, cells: Iterable) -> list:
        """Of these `Cell`s those that are not there with their very configuration."""
        return [cell for cell in cells if self.load(cell) is None]

    def save(self, cell: dict) -> None:
        missing = [field for field in FIELDS if field not in cell]
        if missing:
            raise ValueError(f"cell: fields {missing} are missing; it needs {list(FIELDS)}")
        cell = dict(cell)
        name, lines = self.name(*(cell[key] for key in NAMED)), cell.pop("samples", None)
        if lines is not None:
            self.logs.prepare()
            text = "".join(json.dumps(finite(line), ensure_ascii=False) + "\n" for line in lines).encode()
            self.logs.write(f"{name}l", text)
            cell["samples"] = sum_of(text)
        self.files.write(name, written(cell))

    def samples(self, cell: dict) -> list[dict]:
        """What was asked and answered in a stored cell, a dictionary for each document; none where nothing
        was kept or the file is damaged, which is a warning. `eval/accuracy/samples.py` says what is in it."""
        name = f"{self.name(*(cell[key] for key in NAMED))}l"
        try:
            text = self.logs.read(name) or b""
            total = sum_of(text)
            if text and cell.get("samples", total) != total:
                raise ValueError("its content is not what was written")
            lines = [from_json(line) for line in text.splitlines()]
            for line in lines:
                check_sample(line)
        except (OSError, ValueError) as error:
            self.warn(f"damaged samples {shown(name)}: {one_line(error)}; they are left out")
            return []
        return lines

    def records(self) -> Iterator[dict]:
        """Every readable cell, in the order of the file names."""
        for name in self.files.names():
            if (cell := self.read(name)) is not None:
                yield cell

    def write_tables(self, cells: Iterable[dict]) -> None:
        """Write summary.json and speed.json from these cells."""
        summary, speed = [], []
        for cell in cells:
            names = {key: cell[key] for key in ("model", "method", "task")}
            names |= {key: cell["config"].get(key) for key in ("protocol", "limit", "dtype")}
            summary += [
                names | {key: row[key] for key in ("metric", "value", "stderr", "n")}
                for row in cell.get("metrics", [])
            ]
            if cell["task"].startswith(SPEED):
                head = {"model": cell["model"], "method": cell["method"]}
                speed += [head | row for row in cell.get("rows", [])]
        write_json(self.out / "summary.json", summary)
        write_json(self.out / "speed.json", speed)


def read(files: Folder | Remote, warn: Callable[[str], None], name: str) -> dict | None:
    """The cell in a file; None where there is none, or a damaged one, which is a warning."""
    try:
        data = files.read(name)
        return None if data is None else parsed(data)
    except (OSError, ValueError) as error:
        warn(f"damaged cell {shown(name)}: {one_line(error)}; it is left out or made again")
        return None
