"""Kept: finished batches of a task, so that a killed run continues after the last of them.

All methods of a task share their prefills, so they end together, which may take hours. Every batch of
documents that all of them have answered is one line, its sum and JSON, of OUT/partial/HASH.jsonl, appended at
once. HASH is of the whole configuration of the methods' cells. A line has the batch's answers and, as they
were after it, the sums that a cell's numbers are made of. So a run that goes on gives the same numbers, bit
for bit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from ..core.cells import sum_of

FOLDER = "partial"


def path_of(folder: Path, cells: Iterable[str]) -> Path:
    """The file of cells, by their names, that are made together."""
    return folder / f"{hashlib.sha256(' '.join(cells).encode()).hexdigest()[:16]}.jsonl"


class Kept:
    """See the module's text. path: None keeps nothing.

    What it is handed as `work` has what a `Scorer` has: `caches`, `meters`, `clock`, `contexts`, `tokens`,
    `held` and `errors`.
    """

    def __init__(self, path: Path | None = None):
        self.path, self.found = path, {}
        if path is None or not path.is_file():
            return
        data = path.read_bytes()
        *whole, begun = data.split(b"\n")
        os.truncate(path, len(data) - len(begun))  # it was killed while it wrote this line
        for total, _, line in (line.partition(b" ") for line in whole):
            if total.decode(errors="replace") == sum_of(line):  # else it is damaged, and computed again
                record = json.loads(line)
                self.found[record["key"]] = record

    def of(self, what: str, asked) -> str:
        """A name for what is asked, as lines have it."""
        return "" if self.path is None else f"{what} {hashlib.sha256(repr(asked).encode()).hexdigest()[:16]}"

    def batch(self, work, name: str, members: list, compute: Callable[[], dict]) -> dict:
        """{method: answers} of a batch: those that are kept, or else computed and kept, unless a method
        failed meanwhile."""
        key = f"{name} {members[0]}-{members[-1]}-{len(members)} {' '.join(work.caches)}"
        if (record := self.found.get(key)) is not None:
            _put_back(work, record)
            return record["answers"]
        failed = len(work.errors)
        answers = compute()
        if self.path is not None and len(work.errors) == failed:
            line = json.dumps({"key": key, "answers": answers, **_taken(work, members)}).encode()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(sum_of(line).encode() + b" " + line + b"\n")
        return answers

    def drop(self) -> None:
        """The cells are stored: what was kept for them goes."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # another task's file is there
                self.path.parent.rmdir()


def _taken(work, members: list) -> dict:
    """The sums after a batch."""
    meters = {name: meter.sums for name, meter in work.meters.items()}
    held = {name: [found.get(index) for index in members] for name, found in work.held.items()}
    counted = {"contexts": work.contexts, "tokens": work.tokens}
    clock = {"own": work.clock.own, "shared": work.clock.shared}
    return {"members": members, "meters": meters, "held": held, "counted": counted, "clock": clock}


def _put_back(work, record: dict) -> None:
    for name, sums in record["meters"].items():
        work.meters[name].sums = Counter(sums)
    for name, found in record["held"].items():
        work.held.setdefault(name, {}).update(zip(record["members"], found, strict=True))
    for name, counted in record["counted"].items():
        getattr(work, name).update({key: n - getattr(work, name)[key] for key, n in counted.items()})
    work.clock.set(**record["clock"])
